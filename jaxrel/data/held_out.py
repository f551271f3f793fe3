"""The fixed held-out set: the first windows of the held-out split, in their own order."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxrel.config import BatchConfig
from jaxrel.data.store import TokenStream
from jaxrel.exit_codes import DataRefusedError


class HeldOut:
    """Batches of the held-out split of a corpus, the same at every evaluation.

    Batch b holds windows b*B to b*B + B - 1 of batch.sequence + 1 tokens, group g of G its
    rows g*B/G to (g+1)*B/G - 1. Every process counts the same batches; in the last one, rows
    beyond the end repeat the last window and have weight 0.

    Args:
        folder: Folder of the corpus.
        batch: The run's batch; evaluation is divided into the same groups.
        groups: Those that this process owns.
        limit: Most batches that are used.

    Raises DataRefusedError when the split has no window at all.
    """

    def __init__(
        self, folder: Path, batch: BatchConfig, *, groups: Sequence[int], limit: int
    ) -> None:
        self._stream = TokenStream(folder, "held_out")
        self._sequence, self._batch = batch.sequence, batch.global_size
        self._rows = batch.global_size // batch.groups
        self._groups = list(groups)
        windows = max(0, self._stream.split.tokens - 1) // batch.sequence
        if not windows:
            raise DataRefusedError(
                f"the held_out split of {folder} has {self._stream.split.tokens} tokens: fewer"
                f" than one window of batch.sequence {batch.sequence} + 1; set evaluation.every"
                " to 0, or hold out more text"
            )
        self.windows = min(windows, limit * batch.global_size)
        """Windows that are evaluated."""

    def __len__(self) -> int:
        """Batches."""
        return -(-self.windows // self._batch)

    def __iter__(self) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
        """({"tokens": int32 [groups here, B/G, sequence + 1]}, weights float32 [all G, B/G])."""
        for at in range(0, len(self) * self._batch, self._batch):
            ids = np.arange(at, at + self._batch).reshape(-1, self._rows)
            mine = np.minimum(ids[self._groups], self.windows - 1)
            tokens = [
                [self._stream.read(int(w) * self._sequence, self._sequence + 1) for w in row]
                for row in mine
            ]
            yield {"tokens": np.asarray(tokens, np.int32)}, (ids < self.windows).astype(np.float32)
