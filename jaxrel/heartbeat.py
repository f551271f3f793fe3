"""How far a process has come, in a small memory-mapped file that its agent reads.

Writing it is a store into memory: it costs nothing, cannot block, and what was written last
stays readable after the process has died or stopped, so that blame rests on the very last
progress of every rank and not on what a message queue still held.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "JAXREL_PROGRESS"
"""Names the file; the agent makes it."""

PHASES = (
    "spawned", "start", "join", "restore", "compile", "data", "step", "wait", "evaluation",
    "checks", "checkpoint", "stop", "done", "failed",
)  # fmt: skip
"""In the loop: waiting for the batch, dispatching the step, waiting for one to complete."""

SIZE = 4096
_FIELDS = struct.Struct("<IIqqq")  # phase, dumps, completed, dispatched, changed
_SEQUENCE = struct.Struct("<Q")  # the number of the writing, in front of the fields and behind them
_FIELDS_AT = _SEQUENCE.size
_BEHIND_AT = _FIELDS_AT + _FIELDS.size
_ERROR_AT, _ERROR_SIZE = 256, 1024


@dataclass(frozen=True)
class Beat:
    """What a process last said of itself."""

    phase: str = "spawned"
    completed: int = 0
    """Steps complete."""
    dispatched: int = 0
    """Steps handed to the devices."""
    changed_ns: int = 0
    """When it said so, by CLOCK_MONOTONIC of the machine; 0 before it said anything."""
    dumps: bool = False
    """Whether SIGUSR1 makes it write its stacks; before that it would die of it."""
    error: str = ""
    """In phase `failed`: `Type: message`, one line."""


class Heartbeat:
    """The writing side; without a file it does nothing."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """Open the file named `path`; None does nothing."""
        self._map: mmap.mmap | None = None
        self._sequence = self._completed = self._dispatched = 0
        self._phase, self._dumps = "spawned", False
        if path is not None:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), SIZE)

    @classmethod
    def from_environment(cls) -> "Heartbeat":
        """The one that this process's agent reads, if there is an agent."""
        return cls(os.environ.get(ENVIRONMENT))

    def beat(self, phase: str, completed: int | None = None, dispatched: int | None = None) -> None:
        """Say where the process is; what is not given stays."""
        self._phase = phase
        self._completed = self._completed if completed is None else completed
        self._dispatched = self._dispatched if dispatched is None else dispatched
        self._store()

    def can_dump(self) -> None:
        """SIGUSR1 writes this process's stacks from now on."""
        self._dumps = True
        self._store()

    def failed(self, error: BaseException) -> None:
        """The process is about to leave with `error`."""
        if self._map is not None:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            text = line.encode("utf-8", "replace")[: _ERROR_SIZE - 1]
            self._map[_ERROR_AT : _ERROR_AT + len(text) + 1] = text + b"\0"
        self.beat("failed")

    def _store(self) -> None:
        if self._map is None:
            return
        self._sequence += 1
        # From the back to the front, while readers go from the front to the back: the number
        # behind is new before a field is, and the one in front only after all of them.
        _SEQUENCE.pack_into(self._map, _BEHIND_AT, self._sequence)
        _FIELDS.pack_into(
            self._map, _FIELDS_AT, PHASES.index(self._phase), int(self._dumps),
            self._completed, self._dispatched, time.monotonic_ns(),
        )  # fmt: skip
        _SEQUENCE.pack_into(self._map, 0, self._sequence)


def create(path: Path) -> None:
    """Make the file, readable by this user alone."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.truncate(descriptor, SIZE)
    finally:
        os.close(descriptor)


def read(path: Path) -> Beat | None:
    """What the process last said; None if it was read in the middle of a write, or is gone."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < SIZE:
        return None
    phase, dumps, completed, dispatched, changed = _FIELDS.unpack_from(data, _FIELDS_AT)
    front, behind = (_SEQUENCE.unpack_from(data, at)[0] for at in (0, _BEHIND_AT))
    if front != behind or phase >= len(PHASES):
        return None
    error = data[_ERROR_AT : _ERROR_AT + _ERROR_SIZE].split(b"\0")[0].decode("utf-8", "replace")
    name = PHASES[phase]
    return Beat(
        name, completed, dispatched, changed, bool(dumps), error if name == "failed" else ""
    )
