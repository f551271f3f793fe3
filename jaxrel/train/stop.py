"""Being asked to stop: SIGTERM, heard at the next step boundary, by all processes alike."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class StopSignal:
    """While the block runs, SIGTERM is a request to save and leave.

    In a job of several processes JAX's own service hears the signal and picks a step that
    every process stops at; one process alone needs no agreement.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if jax.process_count() == 1:
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def asked(self, step: int) -> bool:
        """Whether to stop after `step`. Every process must ask at every step."""
        if jax.process_count() == 1:
            return self._asked
        return multihost_utils.reached_preemption_sync_point(step)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
