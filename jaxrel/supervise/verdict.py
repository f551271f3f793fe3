"""What follows when an attempt is over: another one, after a pause, or the end of the job."""

from dataclasses import dataclass, replace

from jaxrel.exit_codes import ExitCode
from jaxrel.supervise.exchange import End
from jaxrel.supervise.ranks import Rank, code_text, names
from jaxrel.supervise.rootcause import Cause

_FINAL = (ExitCode.DIVERGED, ExitCode.DATA_REFUSED, ExitCode.USAGE)
"""Codes with which a job ends whoever leaves with them: a restart would not help."""

_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Budget:
    """How often a job may start again, and what of it is used."""

    max_restarts: int = 10
    max_no_progress: int = 3
    failures: int = 0
    fruitless: int = 0
    """Attempts running in which the highest completed step did not rise."""
    best: int = 0
    """The highest completed step of the job."""
    fault: tuple[str, int] | None = None
    """Text and step of the last exception, until an attempt is two steps beyond it."""
    repeated: bool = False
    """Whether it has come twice: the code's fault, or the data's, and on no host another."""

    def after(
        self, ranks: tuple[Rank, ...], counts: bool, fault: tuple[str, int] | None = None
    ) -> "Budget":
        """The budget after an attempt that failed, if that `counts`, with the exception `fault`."""
        reached = max((rank.beat.completed for rank in ranks), default=0)
        before = max(self.best, *(rank.resumed for rank in ranks), 0)
        known = self.fault if self.fault and reached <= self.fault[1] + 1 else None
        return replace(
            self,
            failures=self.failures + counts,
            fruitless=0 if reached > before else self.fruitless + 1,
            best=max(self.best, reached),
            fault=fault or known,
            repeated=fault is not None and fault == known,
        )


@dataclass(frozen=True)
class Again:
    """Another attempt, `pause_s` after the last process is gone."""

    pause_s: float


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, and what follows."""

    code: int
    """That stands for all its processes."""
    reason: str
    then: Again | End


def left_by_themselves(ranks: tuple[Rank, ...], speaks: bool) -> Outcome | None:
    """What follows when every process has left as one that is finished or was preempted.

    None when some live, or some left otherwise.
    """
    if not all(rank.left_well(speaks) or rank.code == ExitCode.PREEMPTED for rank in ranks):
        return None
    if any(rank.code == ExitCode.PREEMPTED for rank in ranks):
        return Outcome(ExitCode.PREEMPTED, "preempted: every process saved and left", Again(0))
    return Outcome(ExitCode.OK, "", End(ExitCode.OK))


def after_failure(cause: Cause, ranks: tuple[Rank, ...]) -> Outcome:
    """What a failure means, before the budget is asked."""
    who = "" if cause.rank is None else f"rank {cause.rank.rank}: "
    reason = f"{who}{cause.kind}: {cause.detail}"
    for code in _FINAL:
        if any(rank.code == code for rank in ranks):
            return Outcome(code, reason, End(code, reason))
    suspect = any(rank.code == ExitCode.SUSPECT_HOST for rank in ranks)
    return Outcome(ExitCode.SUSPECT_HOST if suspect else ExitCode.FAILED, reason, Again(0))


def within(budget: Budget, outcome: Outcome, jitter: float) -> Outcome:
    """The outcome when the budget has its say; `jitter` in [0, 1) keeps jobs out of step."""
    if isinstance(outcome.then, End):
        return outcome
    last = f"the last attempt: {outcome.reason}"
    if budget.repeated and budget.fault:
        reason = f"the same exception at step {budget.fault[1]} twice: not hardware; {last}"
    elif budget.failures > budget.max_restarts:
        reason = f"restarts: all {budget.max_restarts} are used; {last}"
    elif budget.fruitless >= budget.max_no_progress:
        attempts = "1 attempt" if budget.fruitless == 1 else f"{budget.fruitless} attempts running"
        reason = f"no progress: no new step in {attempts}, the highest is {budget.best}; {last}"
    else:
        return replace(outcome, then=Again(_pause_s(budget.fruitless, jitter)))
    return replace(outcome, then=End(ExitCode.RESTARTS_EXHAUSTED, reason))


def asked_to_stop(ranks: tuple[Rank, ...], speaks: bool, why: str) -> Outcome:
    """What follows when all processes were told to stop, and have left or must be killed."""
    for code in (*_FINAL, ExitCode.SUSPECT_HOST):
        if found := [rank for rank in ranks if rank.code == code]:
            reason = f"{names(found)} left with exit code {code}"
            return Outcome(code, reason, End(code, reason))
    outcome = left_by_themselves(ranks, speaks)
    if outcome is not None:
        code = ExitCode(outcome.code)
        reason = outcome.reason and f"asked to stop ({why}): every process saved and left"
        return Outcome(code, reason, End(code, reason))
    parts = []
    if killed := [rank for rank in ranks if rank.alive]:
        parts.append(f"{names(killed)} had to be killed")
    if lost := [rank for rank in ranks if rank.lost]:
        parts.append(f"{names(lost)}: {lost[0].lost}")
    for rank in ranks:
        well = rank.left_well(speaks) or rank.code == ExitCode.PREEMPTED
        if rank.code is not None and not well:
            parts.append(f"rank {rank.rank} {code_text(rank.code)}")
    reason = f"asked to stop ({why}): {', '.join(parts)}"
    impatient = why.count("SIGINT") > 1  # a person, who did not wait for the saves
    code = ExitCode.INTERRUPTED if impatient else ExitCode.FAILED
    return Outcome(ExitCode.FAILED, reason, End(code, reason))


def _pause_s(fruitless: int, jitter: float) -> float:
    """None after an attempt that got on, nor after the first that did not."""
    if fruitless < 2:
        return 0.0
    return min(2.0 ** (fruitless - 2), _LONGEST_PAUSE_S) * (0.5 + jitter)
