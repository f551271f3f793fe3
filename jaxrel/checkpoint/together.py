"""Decisions that all processes of a job make alike."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrel.checkpoint.errors import DamagedError
from jaxrel.exit_codes import DataRefusedError, FailedError

T = TypeVar("T")

_PROVEN, _DAMAGED, _REFUSED, _FAILED = 1, 2, 3, 4
"""How an error is told to the others; the highest of all processes counts."""


def together(act: Callable[[], T]) -> T:
    """What `act` returns here; if it fails on one process, it fails on all.

    Otherwise the others would wait for that one in the next collective. The process that
    failed raises its own error; the others raise DamagedError, DataRefusedError or FailedError
    alike. DamagedError, after which a caller may go on, is raised by all or by none.
    """
    error, result = None, None
    try:
        result = act()
    except Exception as caught:
        error = caught
    if jax.process_count() > 1:
        kinds = multihost_utils.process_allgather(np.int32(_kind(error)))
        rank = int(np.argmax(kinds))
        worst = int(kinds[rank])
        if worst and (error is None or (isinstance(error, DamagedError) and worst > _DAMAGED)):
            what = f"process {rank} failed at this checkpoint; its own message says why"
            if worst <= _DAMAGED:
                raise DamagedError(what, proven=bool((kinds == _PROVEN).any()))
            raise (DataRefusedError if worst == _REFUSED else FailedError)(what) from error
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _kind(error: Exception | None) -> int:
    if error is None:
        return 0
    if isinstance(error, DamagedError):
        return _PROVEN if error.proven else _DAMAGED
    return _REFUSED if isinstance(error, DataRefusedError) else _FAILED


def agreed(ask: Callable[[], T]) -> T:
    """Process 0's answer, a JSON value, on every process."""
    answer = together(lambda: ask() if jax.process_index() == 0 else None)
    return from_everyone(answer)[0]


def from_everyone(value: Any) -> list[Any]:
    """What each process gave, JSON values in the order of processes. Collective."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    # Of few sizes, because each is a program of its own.
    padded = np.zeros(max(256, 1 << int(sizes.max() - 1).bit_length()), np.uint8)
    padded[: len(text)] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]
