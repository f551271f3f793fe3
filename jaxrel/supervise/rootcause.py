"""Who began a failure: from how far every rank had come and how it ended.

The order of deaths tells nothing. A rank that is stopped, killed or stuck makes innocent ones
abort, often before its own end is seen, so evidence is weighed in tiers: a process that is
stopped or a host that is lost; then a death that needs no other to explain it; then whoever is
alive but behind; and only then a death of the kind that follows from another's. Within a tier
it is the rank that had come least far, and where that is a tie, nobody is named.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGABRT

from jaxrel.events import FailureDetected, FailureKind
from jaxrel.exit_codes import ExitCode
from jaxrel.supervise.deadlines import Deadlines, Pace
from jaxrel.supervise.ranks import Rank, code_text, names

_ABORTED = (-SIGABRT, 128 + SIGABRT)
"""How JAX ends a process when it misses another one."""

# What an error says that is about another process: of Gloo, of JAX's coordination service, of
# sockets, of jaxrel's own meeting of all processes.
_PEER = re.compile(
    r"peer|gloo|coordination service|heartbeat|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED"
    r"|broken pipe|connection (reset|refused|closed)|process(es)? [\d, ]+(is|are) missing"
    r"|process 0 did not answer",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
"""In a text that is else the same in every attempt."""
_STORAGE = re.compile(r"No space left|quota exceeded|Read-only file system|SaveFailedError")
_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|MemoryError")

_STUCK_S = 5.0
"""A rank that is behind and silent for so long is stuck, not just a little slower."""

_KINDS: dict[int, FailureKind] = {
    ExitCode.USAGE: "exit",
    ExitCode.DATA_REFUSED: "exit",
    ExitCode.PREEMPTED: "preempted",
    ExitCode.SUSPECT_HOST: "hardware",
    ExitCode.DIVERGED: "diverged",
}
"""Of exit codes that say all by themselves."""


@dataclass(frozen=True)
class Cause:
    """What began a failure, as far as it can be told."""

    kind: FailureKind
    rank: Rank | None
    """None when several ranks are equally suspect."""
    detail: str
    since: float | None
    """When it happened: the exit's own time, or the last sign of life."""
    following: tuple[int, ...] = ()
    """Other ranks that died, were stuck, or could not go on without it."""
    fault: tuple[str, int] | None = None
    """Of an exception that names no peer: its text, and the steps that were complete."""

    def detected(self, now: float) -> FailureDetected:
        """For the ledger."""
        return FailureDetected(
            self.kind,
            None if self.rank is None else self.rank.rank,
            None if self.rank is None else self.rank.host,
            self.detail,
            None if self.since is None else round(max(now - self.since, 0.0), 6),
            list(self.following),
            None if self.rank is None else self.rank.beat.completed,
        )


def find(
    ranks: tuple[Rank, ...], pace: Pace, deadlines: Deadlines, speaks: bool, now: float
) -> Cause:
    """The cause of a failure of the attempt that consists of `ranks`."""
    dead = [r for r in ranks if r.code is not None and not r.left_well(speaks)]
    living = [r for r in ranks if r.alive]
    stopped = [r for r in living if r.stopped_at is not None]
    lost = [r for r in ranks if r.lost]
    hard = [r for r in dead if not _follows(r)]
    failed = [r for r in living if r.beat.phase == "failed"]
    if stopped or lost:
        return _blame(stopped + lost, ranks, speaks, _how)
    if hard:
        return _blame(hard, ranks, speaks, _how)
    if failed and not dead:
        return _blame(failed, ranks, speaks, _how)

    def limit(rank: Rank) -> float:
        return deadlines.limit_s(rank.beat.phase, pace)

    def stuck(rank: Rank) -> tuple[FailureKind, str, float]:
        silent = f"no sign of life for {now - rank.at:.1f} s {rank.where}"
        return "hang", f"{silent}; the limit is {limit(rank):.4g} s", rank.at

    if dead:
        behind = [r for r in living if all(r.progress < d.progress for d in dead)]
        behind = [r for r in behind if now - r.at > _STUCK_S]
        return _blame(behind or dead, ranks, speaks, stuck if behind else _how)
    overdue = [r for r in living if now - r.at >= limit(r)] or living
    least = min(r.progress for r in overdue)
    suspects = [r for r in living if r.progress == least or r in overdue]
    return _blame(suspects, ranks, speaks, stuck)


def late(ranks: tuple[Rank, ...], grace_s: float, now: float) -> Cause | None:
    """Who is to blame when ranks did not leave within `grace_s` of SIGTERM; None if all did."""
    living = [rank for rank in ranks if rank.alive]
    if not living:
        return None
    # Who has come further on the way out waits there for the rest.
    least = min(_way_out(rank) for rank in living)
    stuck = [rank for rank in living if _way_out(rank) == least]
    one = stuck[0] if len(stuck) == 1 else None
    detail = f"{names(stuck)} did not leave within {grace_s:g} s of SIGTERM"
    if one:
        detail += f", {one.where}"
    following = tuple(rank.rank for rank in living if rank is not one)
    return Cause("hang", one, detail, now - grace_s, following)


def _way_out(rank: Rank) -> int:
    """How far it has come from the loop to having left."""
    phases = ("checkpoint", "stop", "done")
    return 1 + phases.index(rank.beat.phase) if rank.beat.phase in phases else 0


def _blame(
    suspects: list[Rank],
    ranks: tuple[Rank, ...],
    speaks: bool,
    how: Callable[[Rank], tuple[FailureKind, str, float]],
) -> Cause:
    """The suspect that had come least far; the rest of them are mentioned."""
    suspects = sorted(suspects, key=lambda r: (r.progress, r.rank))
    first = suspects[0]
    kind, detail, since = how(first)
    equal = [r for r in suspects if r.progress == first.progress]
    if len(equal) > 1:
        same = len({how(r)[:2] for r in equal}) == 1
        others = "" if same else "".join(f"; rank {r.rank}: {how(r)[1]}" for r in equal[1:])
        detail = f"{names(equal)}, equally far: {detail}{others}"
    rest = suspects[len(equal) :]
    if rest:
        detail += "; also " + "; ".join(f"rank {r.rank}: {how(r)[1]}" for r in rest)
    named = first if len(equal) == 1 else None
    following = tuple(r.rank for r in ranks if r is not named and not r.left_well(speaks))
    error = first.beat.error
    fault = None
    if kind == "exception" and error and not _PEER.search(error):
        fault = (_ADDRESS.sub("0x", error), first.beat.completed)
    return Cause(kind, named, detail, since, following, fault)


def _how(rank: Rank) -> tuple[FailureKind, str, float]:
    """Kind, detail and time of what happened to a rank that died, failed, stopped or is lost."""
    left_at = rank.at if rank.left_at is None else rank.left_at
    if rank.lost:
        return ("exit" if rank.unstarted else "host_lost"), rank.lost, left_at
    if rank.code in _KINDS:
        said = f": {rank.beat.error}" if rank.beat.error else ""
        return _KINDS[rank.code], f"left with exit code {rank.code}{said}", left_at
    if rank.beat.phase == "failed":
        return _kind_of(rank.beat.error), rank.beat.error or "failed and did not say why", left_at
    if rank.code is None:
        since = rank.at if rank.stopped_at is None else rank.stopped_at
        return "stopped", f"stopped by a signal {rank.where}", since
    if rank.code == ExitCode.OK:
        return "exit", f"left before the run was complete, {rank.where}", left_at
    kind = "signal" if rank.code < 0 or rank.code in _ABORTED else "exit"
    return kind, f"{code_text(rank.code)} {rank.where}", left_at


def _kind_of(error: str) -> FailureKind:
    """Of what a failed process said; storage and memory may both be RESOURCE_EXHAUSTED."""
    if _STORAGE.search(error):
        return "storage"
    return "oom" if _MEMORY.search(error) else "exception"


def _follows(rank: Rank) -> bool:
    """Whether its death is of the kind that another's causes."""
    if rank.code in (*_ABORTED, ExitCode.PREEMPTED):
        return True
    return rank.code not in _KINDS and bool(_PEER.search(rank.beat.error))
