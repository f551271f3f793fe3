"""Small JSON values from every process, on every process."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def from_everyone(value: Any) -> list[Any]:
    """What each process gave, in the order of processes. Collective."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(text)] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]
