"""Decisions that all processes of a job make alike."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrel.exit_codes import DataRefusedError, ExitCode, FailedError

T = TypeVar("T")


def together(act: Callable[[], T]) -> T:
    """What `act` returns here; if it fails on one process, it fails on all.

    Otherwise the others would wait for that one in the next collective. The process that
    failed raises its own error; the others raise DataRefusedError or FailedError alike.
    """
    error, result = None, None
    try:
        result = act()
    except Exception as caught:
        error = caught
    if jax.process_count() > 1:
        code = 0 if error is None else int(getattr(error, "code", ExitCode.FAILED))
        codes = multihost_utils.process_allgather(np.int32(code))
        if error is None and codes.any():
            rank = int(np.flatnonzero(codes)[0])
            kind = DataRefusedError if codes[rank] == ExitCode.DATA_REFUSED else FailedError
            raise kind(f"process {rank} failed at this checkpoint; its own message says why")
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def agreed(ask: Callable[[], int]) -> int:
    """Process 0's answer, on every process: a whole number below 2**31."""
    answer = together(ask)
    if jax.process_count() == 1:
        return answer
    return int(multihost_utils.broadcast_one_to_all(np.int32(answer)))
