"""The leader's ledger, which begins when there is something to tell.

A job that is complete already ends without a step: nothing of it may be on record, or the
run would have stood idle from its end until somebody started it once more.
"""

import time
from contextlib import suppress
from pathlib import Path

from jaxrel.events import AttemptEnded, AttemptStarted, Event, GangDead, JobEnded, JobStarted
from jaxrel.exit_codes import ExitCode
from jaxrel.ledger import Ledger
from jaxrel.supervise.workers import log_path, stacks_path

_IDLE = ("spawned", "start", "join", "done")
"""Phases of a worker that may still find that it has nothing to do."""
_UNTOLD = (JobStarted, AttemptStarted, GangDead, AttemptEnded, JobEnded)


class Provisional:
    """Holds events back until one says more than that a job was started and left well."""

    def __init__(self, run_dir: Path, attempt: int, ranks: int) -> None:
        """`attempt` comes first; nothing is on disk yet."""
        self.attempt = attempt
        self._run_dir, self._ranks = run_dir, ranks
        self._held: list[tuple[float, Event]] = []
        self._ledger: Ledger | None = None
        self._nothing_to_do = False

    def heard(self, phase: str) -> None:
        """A worker says that it is at `phase`."""
        self._nothing_to_do = phase == "done"
        if phase not in _IDLE:
            self._begin()

    def _begin(self) -> None:
        """There is something to tell: write what was held back, at the time it happened."""
        if self._ledger is None:
            self._ledger = Ledger(self._run_dir, source="leader", attempt=self.attempt)
            now = time.monotonic()
            for at, event in self._held:
                self._ledger.write(event, ago_s=now - at)
            self._held = []

    def write(self, event: Event) -> None:
        """Append an event, or hold it back."""
        ended_well = getattr(event, "exit", ExitCode.OK) == ExitCode.OK
        silent = isinstance(event, JobEnded) and not self._nothing_to_do  # it may have worked
        if silent or not ended_well or not isinstance(event, _UNTOLD):
            self._begin()
        if self._ledger is None:
            self._held.append((time.monotonic(), event))
        else:
            self._ledger.write(event)

    def begin_attempt(self, attempt: int) -> None:
        """What follows belongs to another attempt."""
        self.attempt = attempt
        if self._ledger is not None:
            self._ledger.begin_attempt(attempt)

    def sync(self) -> None:
        """Wait until it is on the disk."""
        if self._ledger is not None:
            self._ledger.sync()

    def close(self) -> None:
        """Close the ledger; of a job that came to nothing, take its logs away too."""
        if self._ledger is not None:
            self._ledger.close()
            return
        for path in (log_path, stacks_path):
            for rank in range(self._ranks):
                with suppress(OSError):
                    path(self._run_dir, self.attempt, rank).unlink()
            with suppress(OSError):  # others are in it
                path(self._run_dir, self.attempt, 0).parent.rmdir()
