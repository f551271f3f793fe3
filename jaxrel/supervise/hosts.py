"""The hosts of a job: what speaks against each, and which of them the next attempt gets.

A host whose worker left with exit code 76 (a hardware verdict, a failed health check) is
*drained*: no attempt of the job ever uses it again. One on which first failures keep happening
is *suspect*: it is used only where nothing else will do, and drained once a sound host can take
its place, or once so many of the failures began on it that chance does not explain them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import comb
from typing import Any

from jaxrel.events import HostDrained
from jaxrel.exit_codes import ExitCode
from jaxrel.supervise.ranks import Rank
from jaxrel.supervise.rootcause import Cause

WINDOW = 10
"""Attempts in which first failures are counted."""

_CHANCE = 0.01
"""Less likely than this is not chance."""

_BLAMES = ("exit", "signal", "hang", "stopped", "exception", "host_lost")
"""Kinds of failure that may be a host's fault."""


@dataclass(frozen=True)
class Host:
    """One host. Times are seconds of the leader's clock."""

    name: str
    since: float
    """When it came or went; at first, when the job began."""
    up: bool = False
    """Whether its agent is there."""
    owes: int = 0
    """The attempt of which processes may exist on it; 0 is none."""
    presumed: int = 0
    """The attempt whose processes cannot be left there: no one has looked, as it was lost."""
    blamed: tuple[int, ...] = ()
    """The last attempts whose failure began on it."""
    drained: str = ""
    """Why it is never used again."""

    @property
    def usable(self) -> bool:
        """Whether an attempt can use it."""
        return self.up and not self.drained and not self.presumed


@dataclass(frozen=True)
class Roster:
    """The hosts of a job, in its own order."""

    hosts: tuple[Host, ...]
    drain_after: int

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    @property
    def usable(self) -> set[str]:
        """The names of those that an attempt can use."""
        return {host.name for host in self.hosts if host.usable}

    # What happens to a host

    def arrived(self, name: str, now: float) -> "Roster":
        """Its agent is there."""
        return self._set((name,), up=True, since=now)

    def left(self, name: str, now: float) -> "Roster":
        """Its agent is gone."""
        return self._set((name,), up=False, since=now)

    def used(self, names: Iterable[str], attempt: int) -> "Roster":
        """An attempt starts on these."""
        return self._set(names, owes=attempt)

    def proven(self, name: str, attempt: int) -> "Roster":
        """Nothing of the attempt is left there."""
        host = self[name]
        owes, presumed = (0 if n == attempt else n for n in (host.owes, host.presumed))
        return self._set((name,), owes=owes, presumed=presumed)

    def presume(self) -> "Roster":
        """What hosts still owe is gone; who comes back looks first whether it is."""
        hosts = (replace(h, owes=0, presumed=h.owes or h.presumed) for h in self.hosts)
        return replace(self, hosts=tuple(hosts))

    def unproven(self, lost_s: float, now: float) -> tuple[list[str], list[float]]:
        """On which hosts processes may exist: those whose agent is there; until when, of others."""
        owing = [host for host in self.hosts if host.owes]
        until = [host.since + lost_s for host in owing if not host.up]
        return [host.name for host in owing if host.up], [at for at in until if at > now]

    # Blame

    def verdicts(
        self, ranks: tuple[Rank, ...], attempt: int
    ) -> tuple["Roster", tuple[HostDrained, ...]]:
        """Without the hosts of which a worker of `attempt` says that they are no good."""
        roster, told = self, []
        for rank in ranks:
            if rank.code == ExitCode.SUSPECT_HOST and not roster[rank.host].drained:
                said = f": {rank.beat.error}" if rank.beat.error else ""
                reason = f"rank {rank.rank} of attempt {attempt} left with exit code 76{said}"
                roster = roster._set((rank.host,), drained=reason)
                told.append(HostDrained(rank.host, reason))
        return roster, tuple(told)

    def judged(
        self, cause: Cause, used: tuple[str, ...], attempt: int, legal: tuple[int, ...]
    ) -> tuple["Roster", tuple[HostDrained, ...]]:
        """What the failure of `attempt` says about the hosts it `used`, and what of it is news."""
        roster = self._recent(attempt)
        if cause.rank is None or cause.kind not in _BLAMES:
            return roster, ()
        before = roster[cause.rank.host]
        name, mine = before.name, len(before.blamed) + 1
        roster = roster._set((name,), blamed=(*before.blamed, attempt))
        if mine < self.drain_after:
            return roster, ()
        left = [host for host in roster.hosts if not host.drained]
        failures = sum(len(host.blamed) for host in left)
        reason = f"{mine} of {failures} failures in the last {WINDOW} attempts began on it"
        sound = any(h.usable and not self.suspects(h) and h.name not in used for h in left)
        certain = by_chance(mine, failures, len(used)) < _CHANCE
        if (sound or certain) and largest(legal, len(left) - 1):
            return roster._set((name,), drained=reason), (HostDrained(name, reason),)
        return roster, ()

    def suspects(self, host: Host) -> bool:
        """Whether failures keep beginning on it."""
        return len(host.blamed) >= self.drain_after

    def possible(self, legal: tuple[int, ...]) -> int:
        """How many hosts an attempt can ever have again; 0 is none."""
        return largest(legal, sum(not host.drained for host in self.hosts))

    # Placement

    def place(
        self, legal: tuple[int, ...], last: tuple[str, ...], patience_s: float, now: float
    ) -> tuple[str, ...]:
        """The hosts of the next attempt; none while some that may come would make it larger.

        First those of the `last` one, then others in the job's order; suspect ones at the end.
        A host that was lost is waited for `patience_s`.
        """
        usable = [host for host in self.hosts if host.usable]
        count = largest(legal, len(usable))
        if not count or count < largest(legal, len(usable) + len(self._coming(patience_s, now))):
            return ()
        before = set(last)
        usable.sort(key=lambda host: (self.suspects(host), host.name not in before))
        return _arranged([host.name for host in usable[:count]], last)

    def look_again(self, patience_s: float, now: float) -> float | None:
        """When the patience with a host ends that may still come."""
        return min((h.since + patience_s for h in self._coming(patience_s, now)), default=None)

    def grows_at(self, legal: tuple[int, ...], count: int, after_s: float) -> float | None:
        """When hosts for more than `count` will have been there for `after_s`."""
        since = sorted(host.since for host in self.hosts if host.usable)
        larger = largest(legal, len(since))
        return since[larger - 1] + after_s if larger > count else None

    def _coming(self, patience_s: float, now: float) -> list[Host]:
        hosts = (h for h in self.hosts if not h.usable and not h.drained)
        return [host for host in hosts if now < host.since + patience_s]

    def _recent(self, attempt: int) -> "Roster":
        """With first failures as of `attempt`."""
        oldest = attempt - WINDOW + 1
        hosts = (
            replace(host, blamed=tuple(n for n in host.blamed if n >= oldest))
            for host in self.hosts
        )
        return replace(self, hosts=tuple(hosts))

    def _set(self, names: Iterable[str], **changes: Any) -> "Roster":
        named = set(names)
        hosts = (replace(h, **changes) if h.name in named else h for h in self.hosts)
        return replace(self, hosts=tuple(hosts))


def largest(legal: tuple[int, ...], most: int) -> int:
    """The largest legal number of hosts that is at most `most`; 0 when there is none."""
    return next((count for count in legal if count <= most), 0)


def by_chance(mine: int, failures: int, hosts: int) -> float:
    """At most how likely it is that any one of equal `hosts` has `mine` or more of `failures`."""
    share = 1 / hosts
    tail = (
        comb(failures, n) * share**n * (1 - share) ** (failures - n)
        for n in range(mine, failures + 1)
    )
    return min(1.0, hosts * sum(tail))


def _arranged(chosen: list[str], last: tuple[str, ...]) -> tuple[str, ...]:
    """In the order of the last attempt, so that ranks stay where they were if they can."""
    before, after = set(last), set(chosen)
    others = iter([name for name in chosen if name not in before])
    stay = (name if name in after else next(others, None) for name in last)
    return tuple(name for name in (*stay, *others) if name is not None)
