"""How long a process may say nothing, by what it is at.

One number scales them all, the floor: what a step in a running loop may always take. Inside
the loop the limit follows the slowest healthy step once there is one; outside it, where
times are known to nobody beforehand, it is a generous multiple of the floor.

Processes of a job go on together or not at all, so what counts is the silence of all of them,
and the limit is that of whoever has come least far: the rest wait for it, and are excused
while it is within its limit (a long save on one rank is no hang of the others). No process
may be silent for longer than the longest limit of all.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jaxrel.heartbeat import Beat
from jaxrel.supervise.ranks import LOOP, Rank

_FLOORS = {
    "spawned": 10, "start": 10, "join": 10, "restore": 20, "compile": 20, "evaluation": 10,
    "checks": 10, "checkpoint": 20, "stop": 10, "done": 1,
}  # fmt: skip
_SHORTEST_S = 30.0
_LEAVING_S = 10.0
"""From saying `failed` to having left."""
_SETTLED = 20
"""Steps after which the slowest is a measure of the job, and not of its beginning."""


@dataclass(frozen=True)
class Pace:
    """How fast steps are in this attempt."""

    steps: int = 0
    """Measured on the rank where most were."""
    slowest_s: float = 0.0
    first_s: float = 0.0
    """What compiling and the first step took together."""


@dataclass(frozen=True)
class Deadlines:
    """The limits of a job, in seconds."""

    floor_s: float = 60.0

    def limit_s(self, phase: str, pace: Pace) -> float:
        """How long a process may be in `phase` without a sign of life."""
        if phase == "failed":
            return _LEAVING_S
        if phase not in LOOP:
            return max(_FLOORS[phase] * self.floor_s, _SHORTEST_S)
        if not pace.steps:
            return max(self.floor_s, pace.first_s)
        if pace.steps < _SETTLED:
            return max(self.floor_s, 10 * pace.slowest_s)
        return max(self.floor_s, 3 * pace.slowest_s + 2)

    def longest_s(self, pace: Pace) -> float:
        """The longest limit of all."""
        return max(self.limit_s(phase, pace) for phase in (*_FLOORS, *LOOP))

    @property
    def stopped_s(self) -> float:
        """How long a process may be stopped by a signal."""
        return min(self.floor_s, 5.0)

    @property
    def agent_s(self) -> float:
        """How long an agent may be silent; it speaks every second."""
        return max(4.0, min(15.0, 0.8 * self.floor_s))

    def ladder(self) -> str:
        """All limits in order, in one line."""
        named: dict[float, list[str]] = {}
        for phase in _FLOORS:
            named.setdefault(self.limit_s(phase, Pace()), []).append(phase)
        others = " < ".join(f"{', '.join(named[s])} {s:g} s" for s in sorted(named))
        return (
            f"stopped process {self.stopped_s:g} s, silent agent {self.agent_s:g} s; step"
            f" {self.floor_s:g} s or 3 x the slowest + 2 s; {others}; JAX's own timeouts must be"
            " longer"
        )


def due(ranks: Iterable[Rank], pace: Pace, deadlines: Deadlines, speaks: bool) -> float | None:
    """When the attempt counts as hung if nothing is heard until then.

    None when nothing can be told: every process has left, or the command has never reported
    progress (`speaks`), as one that knows nothing of jaxrel.
    """
    living = [rank for rank in ranks if rank.alive]
    return min(_due(living, pace, deadlines, speaks), default=None)


def _due(living: list[Rank], pace: Pace, deadlines: Deadlines, speaks: bool) -> Iterator[float]:
    behind = min((rank.progress for rank in living), default=None)
    heard = max((rank.at for rank in living), default=0.0)
    for rank in living:
        if rank.stopped_at is not None:
            yield rank.stopped_at + deadlines.stopped_s
        if not speaks:
            continue
        limit = deadlines.limit_s(rank.beat.phase, pace)
        if rank.beat.phase == "failed":
            yield rank.at + limit
        elif rank.progress == behind:
            yield heard + limit
        yield rank.at + deadlines.longest_s(pace)


@dataclass(frozen=True)
class Stopwatch:
    """Measures the steps of one rank from the beats that are seen of it."""

    compiling: float | None = None
    """When compiling began."""
    since: float | None = None
    """When the last step was complete, if nothing but the loop came after it."""
    steps: int = 0
    """Measured on this rank."""

    def __call__(self, old: Beat, new: Beat, pace: Pace) -> tuple["Stopwatch", Pace]:
        """What a beat tells, by the clock of the process itself.

        Steps that were complete between two looks count as one that took all the time: too
        slow by a poll at most, and never too fast.
        """
        at = new.changed_ns / 1e9
        compiling, since, steps = self.compiling, self.since, self.steps
        if new.phase == "compile":
            compiling = at if compiling is None else compiling
        elif compiling is not None:
            pace, compiling = replace(pace, first_s=max(pace.first_s, at - compiling)), None
        if new.completed > old.completed:
            if since is not None:
                steps += new.completed - old.completed
                slowest = max(pace.slowest_s, at - since)
                pace = replace(pace, slowest_s=slowest, steps=max(pace.steps, steps))
            since = at
        if new.phase not in LOOP:
            since = None
        return Stopwatch(compiling, since, steps), pace
