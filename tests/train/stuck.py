"""A pipeline like the corpus's, slow at every position or stuck at one until a file is there."""

import os
import time
from typing import Any

import grain

from jaxrel.data.corpus import standard_library_corpus
from jaxrel.data.windows import group_batches

POSITION = 6


def batches(
    *, shard: int, num_shards: int, rows: int, sequence: int, seed: int
) -> grain.MapDataset:
    """The function for `data.pipeline`."""
    folder, batch = standard_library_corpus(), rows * num_shards
    make, _ = group_batches(
        folder, "train", batch=batch, sequence=sequence, groups=num_shards, seed=seed
    )

    def wait(position: int, leaves: dict[str, Any]) -> dict[str, Any]:
        if shard == 3:
            time.sleep(float(os.environ.get("SLOW_S", "0")))
            gate = os.environ.get("STUCK_UNTIL")
            if gate and position == POSITION and not os.path.exists(gate):
                time.sleep(600)
        return leaves

    return make(shard).map_with_index(wait)
