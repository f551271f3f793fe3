"""Supervised jobs of real processes, for tests: run one, and see that nothing is left of it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrel.events import AttemptEnded, AttemptStarted, Event, FailureDetected, JobEnded
from jaxrel.ledger.reader import read

ROOT = Path(__file__).parents[2]


@dataclass
class Finished:
    """A job that has ended."""

    code: int
    text: str
    run: Path
    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[Any]) -> list[Any]:
        """Its events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def failure(self) -> FailureDetected:
        """The only failure of the job."""
        failures = self.of(FailureDetected)
        assert len(failures) == 1, (failures, self.text)
        return failures[0]

    @property
    def attempts(self) -> int:
        """How many there were."""
        return len(self.of(AttemptStarted))

    @property
    def reason(self) -> str:
        """Why it ended."""
        return self.of(JobEnded)[-1].reason


def worker(**plan: Any) -> list[str]:
    """The command line of a worker."""
    return [sys.executable, "-m", "tests.supervise.worker", json.dumps(plan)]


class Launched:
    """`jaxrel launch` as a process; killed with all that it started when the block ends."""

    def __init__(
        self,
        run: Path,
        command: list[str],
        *flags: str,
        program: tuple[str, ...] = ("-m", "jaxrel.cli"),
    ) -> None:
        """`program` is what Python runs."""
        self.run = run
        run.mkdir(exist_ok=True)
        self._output = run / "launch.txt"
        inherited = {name: v for name, v in os.environ.items() if name[:7] != "JAXREL_"}
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *program, "launch", "--dir", str(run), *flags, "--", *command],
                cwd=ROOT,
                env=inherited | {"PYTHONPATH": str(ROOT), "JAXREL_TEST_RUN": str(run)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
            )

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pid in processes_of(self.run):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def text(self) -> str:
        """What it has said so far."""
        return self._output.read_text()

    def wait_for(self, pattern: str, timeout_s: float = 30.0) -> re.Match[str]:
        """What is found of `pattern` in what it says."""
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            if found := re.search(pattern, self.text):
                return found
            assert self.process.poll() is None, self.text
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in {timeout_s} s: {self.text}")

    def finish(self, timeout_s: float = 40.0) -> Finished:
        """Its end, with everything that it was to leave nothing of."""
        code = self.process.wait(timeout_s)
        assert list(processes_of(self.run)) == [], "processes are left"
        journal = read(self.run)
        events = [record.event for record in journal.records]
        for started in (event for event in events if isinstance(event, AttemptStarted)):
            assert not listens(started.coordinator), "the coordinator's port is still open"
        return Finished(code, self.text, self.run, events)


def launch(run: Path, command: list[str], *flags: str) -> Finished:
    """Run a job to its end."""
    with Launched(run, command, *flags) as launched:
        return launched.finish()


def processes_of(run: Path) -> Iterator[int]:
    """Living processes of a run, whoever their parent is: its workers, agents and children.

    The mark in the environment is inherited by everything that `Launched` starts.
    """
    environments: dict[int, bytes] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    environments[int(name)] = Path(f"/proc/{name}/environ").read_bytes()
    mark = b"JAXREL_TEST_RUN=" + str(run).encode() + b"\0"
    return (pid for pid, text in environments.items() if mark in text)


def agent_of(run: Path, host: str) -> int:
    """The process that is the agent of a host."""
    for pid in processes_of(run):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"agent" in words and host.encode() in words:
            return pid
    raise AssertionError(f"no agent of {host}")


def placements(finished: Finished) -> list[list[str]]:
    """The hosts of each attempt's ranks."""
    return [event.hosts for event in finished.of(AttemptStarted)]


def listens(address: str) -> bool:
    """Whether anybody accepts connections there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def attempt_ends(finished: Finished) -> list[int]:
    """The exit code of each attempt."""
    return [event.exit for event in finished.of(AttemptEnded)]
