"""Being asked to stop: SIGTERM, heard at the next step boundary, by all processes alike."""

import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import jax
from jax.experimental import multihost_utils

T = TypeVar("T")

_POLL_S = 0.1


class StopSignal:
    """While the block runs, SIGTERM is a request to save and leave.

    In a job of several processes JAX's own service, once it runs, takes the signal from the
    handler here and picks a step that every process stops at; one process alone needs no
    agreement. The block may be entered again inside itself. Python hears signals in its main
    thread alone, so in any other thread the block changes nothing.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: list[Any] = []
        self._waits: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and jax_is_alone():
            self._before.append(signal.signal(signal.SIGTERM, self._hear))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before:
            signal.signal(signal.SIGTERM, self._before.pop())

    def asked(self, step: int) -> bool:
        """Whether to stop after `step`. Every process must ask after every step."""
        if jax_is_alone():
            return self._asked
        options: Any = jax.config  # its stubs do not know this one
        if not options.jax_enable_preemption_service:
            return False  # SIGTERM then just kills
        return multihost_utils.reached_preemption_sync_point(step)

    def unless_asked(self, wait: Callable[[], T]) -> T | None:
        """What `wait` returns, or None when SIGTERM came meanwhile; `wait` is then left to itself.

        It runs in a thread of its own, the same each time, and this one looks up ten times a
        second: the kernel may give a signal to any thread, and the main thread hears of it
        only when it runs. Several processes always wait: the step at which they stop needs
        all of them.
        """
        if not jax_is_alone():
            return wait()
        if self._waits is None:
            self._waits = queue.SimpleQueue()
            threading.Thread(
                target=_carry_out, args=(self._waits,), name="wait", daemon=True
            ).start()
        future: Future[T] = Future()
        self._waits.put((future, wait))
        while not self._asked:
            try:
                return future.result(_POLL_S)
            except TimeoutError:
                if future.done():
                    raise  # it is the wait's own
        return None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked = True


def _carry_out(waits: "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]") -> None:
    while True:
        future, wait = waits.get()
        try:
            future.set_result(wait())
        except BaseException as error:
            future.set_exception(error)


def jax_is_alone() -> bool:
    """Whether this process is in no job of several; does not start JAX's devices."""
    return not jax.distributed.is_initialized()
