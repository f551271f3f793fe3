"""Write a run's ledger: one segment a writer, one line an event.

The ledger serves the run and never stops it: what cannot be written is counted and, as soon
as writing works again, the count is on record.
"""

import contextlib
import json
import logging
import math
import os
import re
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxrel.clock import Clock, SystemClock
from jaxrel.events import (
    Event,
    Finished,
    PhaseBegan,
    Record,
    RecordsLost,
    Resumed,
    StepCompleted,
    WorkerStarted,
    to_json,
)
from jaxrel.exit_codes import UsageError
from jaxrel.ledger.reader import DIRECTORY, highest_attempt, segment_name

_log = logging.getLogger(__name__)
_SYSTEM = SystemClock()


class Ledger:
    """The events of one process of a run, in a segment of its own.

    A loop of your own needs two lines of it: `resumed` when the state is ready, `step` after
    each completed update. Whoever knows more than that writes the events themselves.

    Times are the wall clock's at the opening, plus what has passed since: a clock that is set
    meanwhile changes nothing. Methods may be called from any thread.

    Args:
        run_dir: Directory of the run; the segment goes into its `ledger/`, made if missing.
        source: Who writes: `rank0`, `rank1`, ..., or `leader`. Rank 0's records are the run's.
        attempt: Of the run, from 1; 0 for what belongs to none. By default the one that the
            leader set (JAXREL_ATTEMPT), else one more than the ledger holds. Processes that
            train together must be given the same.
        clock: The time.

    Raises UsageError when the segment cannot be made.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        source: str = "rank0",
        attempt: int | None = None,
        clock: Clock = _SYSTEM,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z]\w*", source, re.ASCII):  # it becomes part of a file name
            raise UsageError(f"source: got {source!r}: expected leader, or rank and a number")
        self.run_dir, self.source = Path(run_dir), source
        self.attempt = _attempt(self.run_dir) if attempt is None else attempt
        if self.attempt < 0:
            raise UsageError(f"attempt: got {attempt}: expected a number from 0")
        self._clock, self._lock = clock, threading.RLock()  # a signal handler may write too
        self._wall_us, self._opened_us = clock.wall_us(), clock.monotonic_us()
        self._written = self._lost = 0
        self._error = self._phase = ""
        self._torn = self._closed = False
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            directory = self.run_dir / DIRECTORY
            raise UsageError(f"ledger directory {directory}: cannot write: {error}") from None

    def write(self, event: Event, *, ago_s: float = 0.0) -> None:
        """Append an event, of `ago_s` seconds ago; never raises for what the disk does."""
        with self._lock:
            self._write(event, self._now_us() - round(ago_s * 1e6))

    def resumed(self, step: int, *, devices: int, processes: int = 1) -> None:
        """The state is ready: `step` updates are complete, 0 in a new run.

        For a loop of your own. The time up to the first completed step after it counts as
        compilation, because that is where the step is compiled.
        """
        with self._lock:
            if not self._written:
                process = int(re.sub(r"\D", "", self.source) or 0)
                started = WorkerStarted(process, processes, os.getpid(), os.uname().nodename)
                self._write(started, self._wall_us)
            self._write(Resumed(step, devices, processes), self._now_us())
            self._write(PhaseBegan("compile"), self._now_us())

    def step(self, step: int, *, loss: Any = None, **fields: Any) -> None:
        """Update `step` is complete; `fields` are those of `StepCompleted`.

        Call it when the update is known to be complete, not when it was dispatched. Scalars
        of NumPy and JAX will do.
        """
        completed = StepCompleted(_plain(step), _plain(loss), **_plain(fields))
        with self._lock:
            if self._phase != "train":
                self._write(PhaseBegan("train"), self._now_us())
            self._write(completed, self._now_us())

    def finished(self, step: int, state_digest: str = "") -> None:
        """The run is complete, and its last step is saved. For a loop of your own."""
        self.write(Finished(_plain(step), state_digest))
        self.sync()

    def begin_attempt(self, attempt: int) -> None:
        """Go on as another attempt, in a new segment. For a leader, which outlives attempts."""
        with self._lock:
            self.attempt, old = attempt, self._file
            try:
                self._open()
            except OSError as error:
                self._warn(f"cannot begin a segment: {error}; going on in the old one")
            else:
                with contextlib.suppress(OSError):
                    os.close(old)

    def sync(self) -> None:
        """Wait until what was written is on the disk; a failure is logged."""
        with self._lock:
            try:
                if not self._closed:
                    os.fsync(self._file)
            except OSError as error:
                self._warn(f"cannot sync: {error}")

    def close(self) -> None:
        """Close the segment; what is written later is lost."""
        with self._lock:
            if self._closed:
                return
            if self._lost:
                with contextlib.suppress(OSError):
                    self._confess()
            self._closed = True
            with contextlib.suppress(OSError):
                os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _now_us(self) -> int:
        return self._wall_us + self._clock.monotonic_us() - self._opened_us

    def _open(self) -> None:
        """A new segment, in a directory that is made anew if it is gone."""
        directory = self.run_dir / DIRECTORY
        directory.mkdir(exist_ok=True)
        name = segment_name(self.attempt, self.source, secrets.token_hex(8))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(directory / name, flags, 0o644)
        self._torn, self._written = False, 0

    def _write(self, event: Event, time_us: int) -> None:
        try:
            if self._closed:
                raise OSError("the ledger is closed")
            if self._vanished():
                self._reopen()
            if self._lost:
                self._confess()
            self._append(event, time_us)
            if isinstance(event, PhaseBegan):
                self._phase = event.phase
        except OSError as error:
            if not self._lost:
                self._warn(f"cannot write: {error}; the run goes on, and what is lost is counted")
            self._lost, self._error = self._lost + 1, str(error)

    def _append(self, event: Event, time_us: int) -> None:
        """One line in one write, so that no other line can get into it."""
        document = _plain(to_json(Record(time_us, self.attempt, self.source, event)))
        line = json.dumps(document, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        line = b"\n" + line if self._torn else line
        done = os.write(self._file, line)
        # A full disk takes a part of it: the rest of that line is given up.
        self._torn = done < len(line) and (done > 0 or self._torn)
        if done < len(line):
            raise OSError(f"only {done} of {len(line)} bytes were taken")
        self._written += 1

    def _confess(self) -> None:
        """Put on record how many records are missing."""
        self._append(RecordsLost("ledger", self._lost, self._error), self._now_us())
        self._lost = 0

    def _vanished(self) -> bool:
        """Whether the segment was deleted: writing to it would work, and serve nobody."""
        try:
            return os.fstat(self._file).st_nlink == 0
        except OSError:
            return True

    def _reopen(self) -> None:
        old, gone = self._file, self._written
        self._open()
        self._lost, self._error = self._lost + gone, self._error or "the segment was deleted"
        self._warn(f"the segment was deleted, with {gone} records: going on in a new one")
        with contextlib.suppress(OSError):
            os.close(old)

    def _warn(self, what: str) -> None:
        _log.warning("ledger %s: %s", self.run_dir / DIRECTORY, what)


def _attempt(run_dir: Path) -> int:
    given = os.environ.get("JAXREL_ATTEMPT")
    if given is None:
        return highest_attempt(run_dir) + 1
    if not re.fullmatch(r"\d{1,9}", given, re.ASCII):
        raise UsageError(f"JAXREL_ATTEMPT: got {given!r}: expected a number")
    return int(given)


def _plain(value: Any) -> Any:
    """As JSON holds it: a float that is not finite is null, an array a list of numbers."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if hasattr(value, "tolist"):  # NumPy and JAX, arrays and scalars
        listed = value.tolist()
        return _plain(listed) if type(listed) is not type(value) else str(value)
    try:
        return _plain(float(value))
    except (TypeError, ValueError):
        return str(value)
