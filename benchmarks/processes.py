"""Jobs of a benchmark: started, watched, measured, and gone when the block is left."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

_SAMPLE_S = 0.05
_POLL_S = 0.1
_LEAVE_S = 30.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Job:
    """A command in its own process group, and the CPU seconds of all processes below it."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it; `log` takes what it prints."""
        self.log = log
        self._used: dict[tuple[int, str], float] = {}
        self.started = time.time()
        self.samples: list[tuple[float, float]] = [(self.started, 0.0)]
        """(moment, CPU seconds used until then)."""
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env=None if environment is None else {**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def until(self, look: Callable[[], T], deadline_s: float) -> T:
        """What `look` gives as soon as it raises no LookupError.

        Raises RuntimeError, with the end of the log, when the deadline passes or the job ends.
        """
        ends = time.monotonic() + deadline_s
        while True:
            left = self.process.poll()
            try:
                return look()
            except LookupError as error:
                if left is not None or time.monotonic() > ends:
                    after = f"after {deadline_s:g} s" if left is None else f"when it left ({left})"
                    raise RuntimeError(f"{error} {after}:\n{self.tail()}") from error
            time.sleep(_POLL_S)

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-2000:]

    def sampled(self, moment: float) -> None:
        """Wait until a sample was taken after `moment`."""
        while self.samples[-1][0] < moment:
            time.sleep(_SAMPLE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """SIGTERM to the process, then SIGKILL to all that is left below it."""
        self._over.set()
        self._sampler.join()
        if self.process.poll() is not None:
            return  # its number may be another's by now
        below = _tree(self.process.pid)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_LEAVE_S)
        for pid, started in below.items():
            if _started(pid) == started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(_LEAVE_S)

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            for pid in _tree(self.process.pid):
                if (fields := _stat(pid)) is not None:
                    self._used[pid, fields[19]] = (int(fields[11]) + int(fields[12])) / _TICKS
            self.samples.append((time.time(), sum(self._used.values())))


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet reaped does not."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def _tree(root: int) -> dict[int, str]:
    """Start time by process number, of `root` and all below it."""
    found: dict[int, str] = {}
    left = [root]
    while left:
        pid = left.pop()
        if (started := _started(pid)) is not None:
            found[pid] = started
        with suppress(OSError):  # those of its main thread: no job here starts others elsewhere
            left += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


def _started(pid: int) -> str | None:
    fields = _stat(pid)
    return None if fields is None else fields[19]


def _stat(pid: int) -> list[str] | None:
    """What /proc says of a process, from its state on; None when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
