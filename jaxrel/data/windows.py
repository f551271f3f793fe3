"""The order in which a corpus is read: windows, shuffled, in groups of rows.

Window w is tokens w*S to w*S + S: S + 1 tokens, each window's last being the next one's
first, so that every token but the first is predicted once an epoch (a tail shorter than a
window is left out). An epoch is a permutation of all windows, another one each time; epochs
follow each other without a gap, and a batch may span two.

With B rows a batch, the batch at position P is elements P*B to P*B + B - 1 of that order,
and group g of G its rows g*B/G to (g+1)*B/G - 1. Step t uses position P(t), the t-th that
is not skipped. So a batch is a function of (seed, t, skipped positions) and nothing else.
"""

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import grain
import numpy as np

from jaxrel.data.store import TokenStream
from jaxrel.exit_codes import DataRefusedError


def batch_position(step: int, skip: Collection[int] = ()) -> int:
    """P(step): the step-th position, from 0, that is not in `skip`."""
    position = step
    for skipped in sorted(set(skip)):
        if skipped <= position:
            position += 1
    return position


def window_ids(
    step: int, *, seed: int, windows: int, batch: int, skip: Collection[int] = ()
) -> np.ndarray:
    """Which windows of the corpus the global batch of `step` consists of: int64 [batch].

    `seed`, `windows` and `batch` are in the fingerprint of a feed under these names.
    """
    order = _shuffled(grain.MapDataset.range(windows), seed).batch(batch, drop_remainder=True)
    return np.asarray(order[batch_position(step, skip)])


def group_batches(
    folder: Path, split: str, *, batch: int, sequence: int, groups: int, seed: int
) -> tuple[Callable[[int], grain.MapDataset], dict[str, Any]]:
    """A function from a group to its batches by position, and the fingerprint of them all.

    A group's batch is {"tokens": int32 [batch / groups, sequence + 1]}. Raises
    DataRefusedError when the corpus is damaged or holds less than one batch.
    """
    source = _Windows(TokenStream(folder, split), sequence)
    stream = source.stream
    if len(source) < batch:
        raise DataRefusedError(
            f"the {split} split of {folder} has {stream.split.tokens} tokens, so {len(source)} "
            f"windows of batch.sequence {sequence} + 1: fewer than batch.global_size {batch}"
        )
    if len(source) > 2**32:  # Grain shuffles 32-bit indices
        raise DataRefusedError(
            f"the {split} split of {folder} has {len(source)} windows, more than 2**32: "
            f"batch.sequence {sequence} is too short for it"
        )
    rows = _shuffled(grain.MapDataset.source(source), seed)
    rows = rows.batch(batch // groups, drop_remainder=True)  # or one row overflows the length
    first = window_ids(0, seed=seed, windows=len(source), batch=batch)
    fingerprint = {
        "kind": "corpus",
        "split": split,
        "content_hash": stream.split.content_hash,
        "tokenizer": stream.corpus.tokenizer,
        "vocabulary": stream.corpus.vocabulary,
        "windows": len(source),
        "leaves": {"tokens": f"int32 [{batch // groups}, {sequence + 1}]"},
        "transforms": "window(sequence + 1, stride sequence), shuffle each epoch, repeat, batch",
        # A release of Grain that shuffles otherwise is found here.
        "order": hashlib.blake2b(first.astype("<i8").tobytes(), digest_size=8).hexdigest(),
    }
    return lambda group: rows[group::groups], fingerprint


def _shuffled(dataset: grain.MapDataset, seed: int) -> grain.MapDataset:
    # Grain's epoch e of seed s is epoch 0 of seed s + e: seeds must not be neighbours.
    digest = hashlib.blake2b(f"windows {seed}".encode(), digest_size=4).digest()
    return dataset.shuffle(seed=int.from_bytes(digest)).repeat()


class _Windows:
    """The windows of a token stream, as a Grain source: {"tokens": int32 [sequence + 1]}."""

    def __init__(self, stream: TokenStream, sequence: int) -> None:
        self.stream = stream
        self._sequence = sequence
        self._length = max(0, stream.split.tokens - 1) // sequence

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": self.stream.read(index * self._sequence, self._sequence + 1)}
