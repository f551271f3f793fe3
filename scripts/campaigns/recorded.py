"""The standard-library corpus as a pipeline that puts on record what each process reads.

The batches are those that a run without `data.pipeline` gets, so both end in the same bits.
Every one that is read adds a line to the file named by CAMPAIGN_READS: process id, shard,
position, hash of the tokens. Each process reads position 0 of shard 0 once more, first, when
it takes the pipeline's fingerprint.
"""

import hashlib
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import grain
import numpy as np

from jaxrel.data.corpus import standard_library_corpus
from jaxrel.data.store import TokenStream
from jaxrel.data.windows import group_batches, window_ids


def batches(
    *, shard: int, num_shards: int, rows: int, sequence: int, seed: int
) -> grain.MapDataset:
    """The function for `data.pipeline`."""
    make, _ = group_batches(
        standard_library_corpus(),
        "train",
        batch=rows * num_shards,
        sequence=sequence,
        groups=num_shards,
        seed=seed,
    )
    file = os.open(os.environ["CAMPAIGN_READS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def record(position: int, batch: dict[str, Any]) -> dict[str, Any]:
        line = f"{os.getpid()} {shard} {position} {token_hash(batch['tokens'])}\n"
        os.write(file, line.encode())
        return batch

    return make(shard).map_with_index(record)


def reads(file: Path, process: int, shards: int) -> list[dict[int, str]]:
    """What `process` read of each shard: token hash by position."""
    found: dict[int, dict[int, str]] = defaultdict(dict)
    probed = False
    for line in file.read_text().splitlines() if file.exists() else []:
        pid, shard, position, tokens = line.split()
        if int(pid) != process:
            continue
        if not probed:
            assert (shard, position) == ("0", "0"), "the fingerprint's own read comes first"
            probed = True
            continue
        assert int(position) not in found[int(shard)], f"read twice: {line}"
        found[int(shard)][int(position)] = tokens
    return [found[shard] for shard in range(shards)]


def expected(steps: int, *, batch: int, sequence: int, groups: int, seed: int) -> list[list[str]]:
    """Token hash of each group at each step, from the definition of the order: [steps][groups]."""
    stream = TokenStream(standard_library_corpus(), "train")
    windows, rows = (stream.split.tokens - 1) // sequence, batch // groups
    table = []
    for step in range(steps):
        ids = window_ids(step, seed=seed, windows=windows, batch=batch)
        tokens = np.stack([stream.read(int(i) * sequence, sequence + 1) for i in ids])
        table.append([token_hash(tokens[g * rows : (g + 1) * rows]) for g in range(groups)])
    return table


def token_hash(tokens: np.ndarray) -> str:
    """16 hex digits over tokens [rows, sequence + 1]."""
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=8).hexdigest()
