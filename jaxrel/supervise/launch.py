"""`jaxrel launch`: a command as a supervised job on this machine."""

import asyncio
import math
import random
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from jaxrel.exit_codes import UsageError
from jaxrel.ledger.reader import highest_attempt
from jaxrel.run_lock import supervised
from jaxrel.supervise.console import Console
from jaxrel.supervise.deadlines import Deadlines
from jaxrel.supervise.leader import Job, Leader
from jaxrel.supervise.local import LocalHosts
from jaxrel.supervise.narrator import Narrator
from jaxrel.supervise.policy import Policy, divisors
from jaxrel.supervise.ports import fresh_ports
from jaxrel.supervise.provisional import Provisional
from jaxrel.supervise.verdict import Budget

_MOST = 512
"""Workers that one machine is asked to run."""


@dataclass(frozen=True)
class Launch:
    """The flags of `jaxrel launch`; seconds, counts, and names."""

    command: tuple[str, ...]
    run_dir: str
    backend: str = "local"
    hosts: int = 1
    processes_per_host: int = 1
    cpu_devices: int | None = None
    max_restarts: int = 10
    max_no_progress: int = 3
    hang_floor: float = 60.0
    grace: float = 60.0
    spares: int = 0
    min_hosts: int = 1
    shrink_after: float = 60.0
    grow_after: float | None = None
    drain_after: int = 3
    host_return: float = 0.2

    def check(self) -> None:
        """Raises UsageError, naming the flag that cannot be used as given."""
        counts = ("hosts", "processes_per_host", "cpu_devices", "max_no_progress", "drain_after")
        for name in counts:
            value = getattr(self, name)
            _expect(name, value, value is None or value >= 1, "at least 1")
        for name in ("max_restarts", "spares"):
            _expect(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for name in ("shrink_after", "grow_after", "host_return"):
            value = getattr(self, name)
            _expect(name, value, value is None or 0 <= value < math.inf, "seconds from 0")
        good = 1 <= self.min_hosts <= self.hosts
        _expect("min_hosts", self.min_hosts, good, f"from 1 to --hosts, {self.hosts}")
        _expect("hang_floor", self.hang_floor, 0 < self.hang_floor < math.inf, "seconds above 0")
        _expect("grace", self.grace, 0 <= self.grace < math.inf, "seconds from 0")
        _expect("backend", self.backend, self.backend == "local", "local")
        processes = (self.hosts + self.spares) * self.processes_per_host
        most = f"at most {_MOST} processes on one machine, not {processes}"
        _expect("hosts", self.hosts, processes <= _MOST, most)
        if not self.run_dir:
            raise UsageError("--dir: got '': expected the run's directory")
        if not self.command:
            raise UsageError("CMD: got nothing: expected a command after --")
        if shutil.which(self.command[0]) is None:
            if Path(self.command[0]).is_file():
                raise UsageError(f"CMD: got {self.command[0]!r}: it is not executable")
            raise UsageError(f"CMD: got {self.command[0]!r}: there is no such command")


def launch(asked: Launch) -> int:
    """Run a job to its end; its exit code. Raises UsageError before anything is started."""
    asked.check()
    run_dir = Path(asked.run_dir).absolute()
    hosts = tuple(f"host{number}" for number in range(asked.hosts + asked.spares))
    policy = Policy(
        hosts,
        asked.processes_per_host,
        Deadlines(asked.hang_floor),
        asked.grace,
        jitter=random.random(),
        spares=asked.spares,
        counts=divisors(asked.hosts, asked.min_hosts),
        shrink_after_s=asked.shrink_after,
        grow_after_s=asked.grow_after,
        drain_after=asked.drain_after,
    )
    console = Console()
    with supervised(run_dir), closing(_ledger(run_dir, policy.processes)) as ledger:
        leader = Leader(
            Job(asked.command, run_dir, asked.cpu_devices),
            policy,
            Budget(asked.max_restarts, asked.max_no_progress),
            hosts=LocalHosts(hosts, asked.host_return),
            ledger=ledger,
            pick_port=fresh_ports(),
            narrator=Narrator(console, run_dir),
        )
        try:
            return asyncio.run(leader.run())
        finally:
            console.close()


def _ledger(run_dir: Path, ranks: int) -> Provisional:
    """The number is given: a job inside a worker of another one counts its own attempts."""
    return Provisional(run_dir, highest_attempt(run_dir) + 1, ranks)


def _expect(flag: str, value: object, good: bool, expected: str) -> None:
    if not good:
        name = flag.replace("_", "-")
        raise UsageError(f"--{name}: got {value}: expected {expected}")
