"""An exception, an exit, a kill, a full disk: at a step, in the process itself.

What is to notice a fault is told nothing of it: an exception comes out of the training step, an
exit is one of the process, and a write is refused by the kernel.
"""

import os
import random
import resource
import signal
from typing import Any

EXIT = 1
"""The exit code of a process that is made to leave: none of jaxrel's own."""


class InjectedError(RuntimeError):
    """Raised where the training step would have been."""


def install(
    trainer: Any,
    *,
    raise_at_step: int | None = None,
    exit_at_step: int | None = None,
    fail_writes_at_step: int | None = None,
    kill_rate: float = 0.0,
    seed: int = 0,
    rank: int | None = None,
    process: int = 0,
    attempt: int = 0,
) -> None:
    """Make `trainer`'s process suffer; each fault comes as its update is about to begin.

    The update before it may still be under way then, neither awaited nor recorded. A process
    that goes on from that update or a later one is spared: only writes fail there too, from its
    first update on.

    Args:
        trainer: a `jaxrel.Trainer` that has not run yet; its `step` is wrapped.
        raise_at_step: raises InjectedError instead of this update, from 1.
        exit_at_step: leaves with EXIT instead of this update, without a word or a clean-up.
        fail_writes_at_step: from this update on no file of the process can grow (EFBIG), as on a
            full disk: no checkpoint, no record, no program is written.
        kill_rate: the probability with which each update is met by SIGKILL. Which ones follows from
            `seed`, process and attempt, so that a schedule can be had again, and an attempt does
            not die where the one before did.
        seed: of those draws.
        rank: the only process that suffers; None is each.
        process: this one.
        attempt: of the run.
    """
    if rank is not None and rank != process:
        return

    def before(update: int) -> None:
        if fail_writes_at_step is not None and update >= fail_writes_at_step:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # Python ignores the signal
        if kill_rate and random.Random(f"{seed} {process} {attempt} {update}").random() < kill_rate:
            os.kill(os.getpid(), signal.SIGKILL)
        if update == exit_at_step:
            os._exit(EXIT)
        if update == raise_at_step:
            raise InjectedError(f"raised on purpose instead of step {update}")

    trainer.step = _Step(trainer.step, before)


class _Step:
    """A `TrainStep` that calls `before` with the number of each update, and is else the same."""

    def __init__(self, step: Any, before: Any) -> None:
        self._step, self._before = step, before
        self._update: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def compiled(self, batch: Any) -> "_Step":
        return _Step(self._step.compiled(batch), self._before)

    def __call__(self, state: Any, batch: Any) -> Any:
        # The state's own counter would have to be waited for each time.
        self._update = (int(state.step) if self._update is None else self._update) + 1
        self._before(self._update)
        return self._step(state, batch)
