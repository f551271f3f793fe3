"""What the decision core is told, and what it asks for.

The same types travel between leader and agents (`messages`). Machines share no clock, so on
the wire `at` is an age in seconds; for the core it is a time of the leader's clock.
"""

from dataclasses import dataclass

from jaxrel.events import Event
from jaxrel.heartbeat import Beat

# What happens


@dataclass(frozen=True)
class HostUp:
    """The agent of a host is there; nothing of this job runs on it but what it was asked for."""

    host: str


@dataclass(frozen=True)
class HostLost:
    """The agent of a host is gone; what it watched can no longer be seen."""

    host: str
    why: str


@dataclass(frozen=True)
class Progress:
    """A process said where it is."""

    attempt: int
    rank: int
    beat: Beat
    at: float


@dataclass(frozen=True)
class Exited:
    """A process ended."""

    attempt: int
    rank: int
    code: int
    """Its exit code, or minus the signal that killed it."""
    at: float


@dataclass(frozen=True)
class Stopped:
    """A process was stopped by a signal; it still exists."""

    attempt: int
    rank: int
    at: float


@dataclass(frozen=True)
class Continued:
    """A stopped process goes on."""

    attempt: int
    rank: int
    at: float


@dataclass(frozen=True)
class SpawnFailed:
    """A process could not be started."""

    attempt: int
    rank: int
    error: str


@dataclass(frozen=True)
class Dumped:
    """What a process is at has been written down, as far as it can be."""

    attempt: int
    rank: int


@dataclass(frozen=True)
class Gone:
    """No process of the attempt is left on the host."""

    attempt: int
    host: str


@dataclass(frozen=True)
class TerminateAsked:
    """Somebody wants the job to stop; said twice, at once."""

    why: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Happening = (
    HostUp | HostLost | Progress | Exited | Stopped | Continued | SpawnFailed | Dumped | Gone
    | TerminateAsked | Tick
)  # fmt: skip

# What to do


@dataclass(frozen=True)
class StartAttempt:
    """Spawn the processes of an attempt; the leader picks the coordinator."""

    attempt: int
    hosts: tuple[str, ...]
    """Of each rank."""


@dataclass(frozen=True)
class Dump:
    """Write down what these ranks are at; each is answered by `Dumped`."""

    attempt: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Terminate:
    """SIGTERM to every process of the attempt."""

    attempt: int


@dataclass(frozen=True)
class Kill:
    """SIGKILL to every process of the attempt on a host, and proof: answered by `Gone`."""

    attempt: int
    host: str


@dataclass(frozen=True)
class Record:
    """Write an event to the ledger."""

    event: Event


@dataclass(frozen=True)
class End:
    """The job is over."""

    code: int
    reason: str = ""


Action = StartAttempt | Dump | Terminate | Kill | Record | End
