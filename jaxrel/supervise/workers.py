"""The processes of one attempt on one host: spawn, watch, dump, kill, and prove dead."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from jaxrel import heartbeat
from jaxrel.heartbeat import Beat
from jaxrel.supervise import proc
from jaxrel.supervise.exchange import (
    Continued,
    Dumped,
    Exited,
    Happening,
    Progress,
    SpawnFailed,
    Stopped,
)
from jaxrel.supervise.messages import Spawn

ENVIRONMENT = (
    "JAXREL_COORDINATOR", "JAXREL_PROCESS_ID", "JAXREL_NUM_PROCESSES", "JAXREL_ATTEMPT",
    "JAXREL_RUN_DIR", "JAXREL_TOKEN", "JAXREL_HOST", "JAXREL_CPU_DEVICES", heartbeat.ENVIRONMENT,
)  # fmt: skip
"""What a worker finds in its environment; a job inside a worker inherits none of it."""

# Of <linux/prctl.h>: PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER.
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def log_path(run_dir: str | Path, attempt: int, rank: int) -> Path:
    """Where a worker's standard output and error go."""
    return Path(run_dir, "logs", f"attempt-{attempt}-rank-{rank}.log")


def stacks_path(run_dir: str | Path, attempt: int, rank: int) -> Path:
    """Where a worker writes its stacks when it is asked."""
    return Path(run_dir, "stacks", f"attempt-{attempt}-rank-{rank}.txt")


class Worker:
    """One process, and the memory in which it says where it is."""

    def __init__(self, order: Spawn, rank: int, host: str, token: str) -> None:
        """Start it, from the main thread of a process with one thread. Raises OSError."""
        self.attempt, self.rank = order.attempt, rank
        self.beat = Beat()
        self.alive = True
        self._stacks = stacks_path(order.run_dir, order.attempt, rank)
        self._dumping: tuple[int, int] | None = None  # size of the file before, and when last seen
        self._stacks.parent.mkdir(parents=True, exist_ok=True)
        log = log_path(order.run_dir, order.attempt, rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        # Memory without a name: nothing to clean up, however this process ends. Mode 0600.
        self._memory = os.memfd_create("jaxrel-progress")
        os.truncate(self._memory, heartbeat.SIZE)
        self._progress = Path(f"/proc/{os.getpid()}/fd/{self._memory}")
        environment = _environment(order, rank, host, token, self._progress)
        parent = os.getpid()
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    order.command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda: _die_with(parent),
                )
        except BaseException:
            os.close(self._memory)
            raise
        self.pid = self._process.pid

    def look(self) -> Progress | None:
        """What it has said since the last look."""
        beat = heartbeat.read(self._progress)
        if beat is None or beat == self.beat or not beat.changed_ns:
            return None
        self.beat = beat
        age_s = max(0.0, (time.monotonic_ns() - beat.changed_ns) / 1e9)
        return Progress(self.attempt, self.rank, beat, age_s)

    def terminate(self) -> None:
        """SIGTERM to the process itself, not to its children."""
        self._signal(signal.SIGTERM)

    def dump(self) -> None:
        """Ask for its stacks, or write down what the kernel shows where it cannot answer."""
        found = proc.stat(self.pid)
        if self.alive and self.beat.dumps and found is not None and found[0] not in "tT":
            size = _size(self._stacks)
            self._dumping = (size, size)
            self._signal(signal.SIGUSR1)
            return
        with suppress(OSError), self._stacks.open("a") as file:
            file.write(proc.describe(self.pid))
        self._dumping = (-1, _size(self._stacks))

    def dumped(self) -> Dumped | None:
        """Whether what was asked for is written; says so once, and is to be asked repeatedly."""
        if self._dumping is None:
            return None
        before, seen = self._dumping
        size = _size(self._stacks)
        # Stacks are written in one go: what has not grown since the last look is complete.
        if self.alive and (size == before or size != seen):
            self._dumping = (before, size)
            return None
        self._dumping = None
        return Dumped(self.attempt, self.rank)

    def ended(self, status: int) -> int:
        """Note that it was reaped, with the status of `waitpid`; its exit code or -signal."""
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode, self.alive = code, False
        return code

    def close(self) -> None:
        """Give the memory back."""
        os.close(self._memory)

    def _signal(self, number: int) -> None:
        # Not reaped, so the number is still its own.
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Crew:
    """All processes of an attempt on this host, from the first spawn to the proof of the end."""

    def __init__(self, attempt: int, host: str, token: str) -> None:
        """None yet; but an agent before this one may have left some of them."""
        self.attempt, self._host, self._token = attempt, host, token
        self._workers: list[Worker] = []
        self._clean = 0
        self._marks = (
            f"JAXREL_TOKEN={token}", f"JAXREL_HOST={host}", f"JAXREL_ATTEMPT={attempt}",
        )  # fmt: skip

    def spawn(self, order: Spawn) -> Iterator[SpawnFailed]:
        """Start the processes of `order`; gives those that could not be."""
        for rank in order.ranks:
            try:
                self._workers.append(Worker(order, rank, self._host, self._token))
            except (OSError, subprocess.SubprocessError) as error:
                yield SpawnFailed(order.attempt, rank, f"{order.command[0]}: {error}")

    def reap(self) -> Iterator[Happening]:
        """What has ended, stopped or gone on; orphans of workers are reaped as well."""
        by_pid = {worker.pid: worker for worker in self._workers if worker.alive}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if not pid:
                return
            if (worker := by_pid.get(pid)) is None:
                continue
            at = (worker.attempt, worker.rank)
            if os.WIFSTOPPED(status):
                yield Stopped(*at, 0.0)
            elif os.WIFCONTINUED(status):
                yield Continued(*at, 0.0)
            else:
                if last := worker.look():
                    yield last
                yield Exited(*at, worker.ended(status), 0.0)

    def look(self) -> Iterator[Happening]:
        """What is new of those that live, and of dumps."""
        for worker in self._workers:
            if worker.alive and (progress := worker.look()):
                yield progress
            if dumped := worker.dumped():
                yield dumped

    def terminate(self) -> None:
        """SIGTERM to each."""
        for worker in self._workers:
            worker.terminate()

    def dump(self, ranks: Collection[int]) -> None:
        """Have these write down what they are at; `look` tells when it is done."""
        for worker in self._workers:
            if worker.rank in ranks:
                worker.dump()

    def kill(self) -> bool:
        """SIGKILL to all that are left; True once nobody was left twice in a row.

        Twice, because a process that is started during one look may be missed by it. To be
        called repeatedly.
        """
        left = proc.members({worker.pid for worker in self._workers}, self._marks)
        proc.kill(left)
        living = any(worker.alive for worker in self._workers)
        self._clean = 0 if left or living else self._clean + 1
        return self._clean >= 2

    def close(self) -> None:
        """Forget them; after the proof."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()


def adopt_orphans() -> None:
    """Become the parent of what this process's descendants leave behind, in place of PID 1."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _environment(order: Spawn, rank: int, host: str, token: str, progress: Path) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    values = (
        order.coordinator, rank, order.processes, order.attempt, order.run_dir, token, host,
        order.cpu_devices, progress,
    )  # fmt: skip
    given = zip(ENVIRONMENT, values, strict=True)
    return mine | {name: str(value) for name, value in given if value is not None}


def _die_with(parent: int) -> None:
    """In the new process: end when the agent's main thread does."""
    _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended before


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
