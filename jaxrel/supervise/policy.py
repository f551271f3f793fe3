"""What a job is, and how long it waits for what."""

from dataclasses import dataclass, field

from jaxrel.supervise.deadlines import Deadlines

LAST_S = 10.0
"""Within this an agent that was left alone has ended its processes."""


@dataclass(frozen=True)
class Policy:
    """A job and its limits, in seconds. Raises ValueError for one that cannot hold."""

    hosts: tuple[str, ...]
    """All that the job may use; the last `spares` of them are not used at first."""
    processes_per_host: int = 1
    deadlines: Deadlines = field(default_factory=Deadlines)
    grace_s: float = 60.0
    """From SIGTERM to SIGKILL."""
    host_s: float = 60.0
    """For all agents to be there at first, and for any legal number of them later."""
    settle_s: float = 0.3
    """For other exits to arrive after one."""
    dump_s: float = 2.0
    kill_s: float = 30.0
    """From SIGKILL to the proof that no process is left, on a host whose agent is there."""
    jitter: float = 0.5
    """In [0, 1): spreads the pauses of jobs that fail together."""
    spares: int = 0
    counts: tuple[int, ...] = ()
    """Numbers of hosts whose devices the job can use, largest first; empty for `divisors`."""
    shrink_after_s: float = 60.0
    """From the loss of a host to going on with fewer, where nothing can take its place."""
    grow_after_s: float | None = None
    """Hosts for a larger number have been there so long: end the attempt in order, to use them.
    None leaves a running attempt alone; the next one uses them."""
    drain_after: int = 3
    """First failures on a host, within `hosts.WINDOW` attempts, that make it suspect."""
    lease_s: float = 60.0
    """An agent that has not heard of its leader for so long ends its processes and leaves."""

    def __post_init__(self) -> None:
        if not 0 <= self.spares < len(self.hosts) or len(set(self.hosts)) < len(self.hosts):
            raise ValueError(f"hosts: got {self.hosts} with {self.spares} spares")
        if self.legal != tuple(sorted({self.wanted, *self.legal}, reverse=True)):
            raise ValueError(f"counts: got {self.counts}, largest first, from {self.wanted} on")
        if not self.deadlines.agent_s < self.lease_s:
            raise ValueError(f"lease_s: got {self.lease_s:g}; a silent agent is given up later")

    @property
    def wanted(self) -> int:
        """How many hosts an attempt has at best."""
        return len(self.hosts) - self.spares

    @property
    def processes(self) -> int:
        """Of an attempt at best."""
        return self.wanted * self.processes_per_host

    def placement(self, hosts: tuple[str, ...]) -> tuple[str, ...]:
        """The host of each rank of an attempt on `hosts`."""
        return tuple(host for host in hosts for _ in range(self.processes_per_host))

    @property
    def legal(self) -> tuple[int, ...]:
        """How many hosts an attempt may have, largest first."""
        return self.counts or divisors(self.wanted)

    @property
    def lost_s(self) -> float:
        """From the loss of an agent to when nothing that it ran can be left."""
        return self.lease_s + LAST_S

    def ladder(self) -> str:
        """All deadlines, in one line."""
        fewer = " or ".join(f"{n}" for n in self.legal[1:])
        lost = f"a lost host is waited for {self.shrink_after_s:g} s, then {fewer} must do"
        return f"{self.deadlines.ladder()}; {lost if fewer else 'no fewer hosts will do'}"


def divisors(hosts: int, least: int = 1) -> tuple[int, ...]:
    """Of `hosts`, from it down to `least`: what divides evenly over it does over each of them."""
    return tuple(count for count in range(hosts, least - 1, -1) if hosts % count == 0)
