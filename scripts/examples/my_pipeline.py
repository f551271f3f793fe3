"""A Grain pipeline of your own: the Zen of Python, one shuffled line a row.

    jaxrel train CONFIG --data.pipeline my_pipeline:lines

Run it from this folder, or put the folder on PYTHONPATH. What the function has to keep to is
written in `jaxrel/data/user_pipeline.py`.
"""

import codecs
import contextlib
import io

import grain
import numpy as np

with contextlib.redirect_stdout(io.StringIO()):
    import this

LINES = [line for line in codecs.decode(this.s, "rot13").splitlines() if line]


def lines(*, shard: int, num_shards: int, rows: int, sequence: int, seed: int) -> grain.MapDataset:
    """Batches {"tokens": int32 [rows, sequence + 1]}: each line's bytes, cut or filled with 0."""

    def tokens(line: str) -> dict[str, np.ndarray]:
        text = np.frombuffer(line.encode()[: sequence + 1], np.uint8)
        return {"tokens": np.pad(text, (0, sequence + 1 - len(text))).astype(np.int32)}

    # Shuffle first, so that all shards see one order; then take every num_shards-th batch.
    order = grain.MapDataset.source(LINES).shuffle(seed=seed).repeat()
    return order.map(tokens).batch(rows)[shard::num_shards]
