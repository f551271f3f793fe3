"""What the leader knows of one process, and which of two has come further."""

from dataclasses import dataclass, field
from signal import Signals

from jaxrel.exit_codes import ExitCode
from jaxrel.heartbeat import Beat

LOOP = ("data", "step", "wait")
"""Phases of a running loop: waiting for data, dispatching, waiting for a step to complete."""

# As they follow each other with the same number of steps complete: after a step come its
# evaluation, checks and save, and then the data of the next.
_ORDER = (
    "spawned", "start", "join", "restore", "compile", "evaluation", "checks", "checkpoint",
    *LOOP, "stop", "failed", "done",
)  # fmt: skip
_BEFORE_LOOP = ("spawned", "start", "join", "restore", "compile")


@dataclass(frozen=True)
class Rank:
    """One process of an attempt, as last seen. Times are seconds of the leader's clock."""

    rank: int
    host: str
    at: float
    """Of its last sign of life: the spawn, or the last beat."""
    beat: Beat = field(default_factory=Beat)
    resumed: int = 0
    """Steps that were complete before its loop began."""
    code: int | None = None
    """Its exit code, or minus the signal that killed it; None while it lives."""
    left_at: float | None = None
    stopped_at: float | None = None
    """Since when it has been stopped by a signal; None while it runs."""
    lost: str = ""
    """Why it can no longer be seen, or could not be started."""
    unstarted: bool = False

    @property
    def alive(self) -> bool:
        """Whether it can still do something, as far as can be seen."""
        return self.code is None and not self.lost

    @property
    def progress(self) -> tuple[int, int, int]:
        """How far it has come; to compare ranks of one attempt."""
        return self.beat.completed, self.beat.dispatched, _ORDER.index(self.beat.phase)

    @property
    def where(self) -> str:
        """The same for a person."""
        return f"in {self.beat.phase}, {self.beat.completed} steps complete"

    def left_well(self, speaks: bool) -> bool:
        """Whether it left as a finished process does.

        `speaks` is whether the command reports progress at all: one that does must have said
        that it is done.
        """
        return self.code == ExitCode.OK and (self.beat.phase == "done" or not speaks)

    def before_loop(self) -> bool:
        """Whether its first step is not complete."""
        return self.beat.phase in _BEFORE_LOOP


def names(ranks: list[Rank]) -> str:
    """`rank 1`, or `ranks 0, 2`."""
    numbers = ", ".join(str(rank.rank) for rank in ranks)
    return f"rank{'s' if len(ranks) != 1 else ''} {numbers}"


def code_text(code: int) -> str:
    """How a process ended, for a person."""
    if code >= 0:
        return f"left with exit code {code}"
    try:
        return f"killed by {Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
