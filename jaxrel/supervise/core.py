"""The decisions of the supervisor, as a pure function: `step(state, happening, now)`.

There is no clock, socket, process or random number in here: the leader feeds it what happens
and does what it asks for, and a simulator can feed it anything. Times are seconds of whoever
feeds it.

    waiting -> running -> examining -> stopping -> backing off -> waiting ...
                  |                       ^  |
                  +----> terminating -----+  +-> ended

What must hold after every event is in `invariants`.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from jaxrel.events import AttemptEnded, GangDead
from jaxrel.exit_codes import ExitCode
from jaxrel.supervise import exchange as x
from jaxrel.supervise.deadlines import Pace, Stopwatch, due
from jaxrel.supervise.hosts import Host, Roster
from jaxrel.supervise.policy import Policy
from jaxrel.supervise.ranks import Rank
from jaxrel.supervise.rootcause import Cause, find, late
from jaxrel.supervise.verdict import (
    Again,
    Budget,
    Outcome,
    after_failure,
    asked_to_stop,
    left_by_themselves,
    within,
)  # fmt: skip

Asked = tuple[x.Action, ...]
"""What is to be done."""


class Stage(StrEnum):
    """What a job is at."""

    WAITING = "waiting for hosts"
    RUNNING = "running"
    EXAMINING = "examining"
    """Something is wrong: other exits may still arrive, dumps are asked for."""
    TERMINATING = "terminating"
    STOPPING = "stopping"
    """SIGKILL is sent; waiting for the proof that no process is left."""
    BACKING_OFF = "backing off"
    ENDED = "ended"


LIVE = (Stage.RUNNING, Stage.EXAMINING, Stage.TERMINATING, Stage.STOPPING)
"""Stages in which processes of an attempt may exist."""


@dataclass(frozen=True)
class State:
    """A job, as far as its leader knows."""

    policy: Policy
    roster: Roster
    budget: Budget = field(default_factory=Budget)
    stage: Stage = Stage.WAITING
    until: float | None = None
    """When the stage must be looked at again; in `running`, see `wake`."""
    limit: float = 0.0
    """When a wait for hosts, or for proof of death, ends the job."""
    attempt: int = 0
    """The last that was started."""
    hosts: tuple[str, ...] = ()
    """Of that attempt; empty before the first of this leader."""
    ranks: tuple[Rank, ...] = ()
    watches: tuple[Stopwatch, ...] = ()
    pace: Pace = field(default_factory=Pace)
    speaks: bool = False
    """Whether the command has ever reported progress."""
    undumped: frozenset[int] | None = None
    """Ranks whose dump is awaited; None before it is asked for."""
    outcome: Outcome | None = None
    """Of the last attempt that was stopped."""
    asked: str = ""
    """Why the job is to stop; empty while it is not."""


def begin(policy: Policy, budget: Budget, attempts: int, now: float) -> State:
    """A job whose run directory has seen `attempts` attempts."""
    roster = Roster(tuple(Host(name, now) for name in policy.hosts), policy.drain_after)
    until = now + policy.host_s
    return State(policy, roster, budget, until=until, limit=until, attempt=attempts)


def wake(state: State) -> float | None:
    """When the job needs a `Tick` at the latest."""
    if state.stage is not Stage.RUNNING:
        return state.until
    hung = due(state.ranks, state.pace, state.policy.deadlines, state.speaks)
    return min((at for at in (hung, _grows_at(state)) if at is not None), default=None)


def step(state: State, event: x.Happening, now: float) -> tuple[State, Asked]:
    """The job after `event`, and what is to be done. An event that is stale changes nothing."""
    if state.stage is Stage.ENDED:
        return state, ()
    state, actions = _take(state, event, now)
    while True:
        after, more = _advance(state, now)
        actions += more
        if after is state:
            return state, actions
        state = after


# What an event tells


def _take(state: State, event: x.Happening, now: float) -> tuple[State, Asked]:
    match event:
        case x.HostUp(name) if name in state.policy.hosts and not state.roster[name].up:
            host = state.roster[name]
            # What may have been left there by the agent before this one must be proven dead.
            attempt = host.owes or host.presumed
            kill = (x.Kill(attempt, name),) if attempt and not _lives(state, name) else ()
            return replace(state, roster=state.roster.arrived(name, now)), kill
        case x.HostLost(name, why) if name in state.policy.hosts and state.roster[name].up:
            return _lose(replace(state, roster=state.roster.left(name, now)), name, why), ()
        case x.TerminateAsked(why):
            return _ask(state, why, now)
        case x.Gone(attempt, name) if name in state.policy.hosts and not _lives(state, name):
            return replace(state, roster=state.roster.proven(name, attempt)), ()
        case (
            x.Progress(attempt, rank) | x.Exited(attempt, rank) | x.Stopped(attempt, rank)
            | x.Continued(attempt, rank) | x.SpawnFailed(attempt, rank) | x.Dumped(attempt, rank)
        ):  # fmt: skip
            known = (
                attempt == state.attempt and state.stage in LIVE and 0 <= rank < len(state.ranks)
            )
            return (_hear(state, event, rank, now) if known else state), ()
        case _:
            return state, ()


def _lives(state: State, host: str) -> bool:
    """Whether the attempt goes on there, as far as can be seen."""
    going_on = state.stage in LIVE and state.stage is not Stage.STOPPING
    return going_on and any(rank.alive for rank in state.ranks if rank.host == host)


def _lose(state: State, host: str, why: str) -> State:
    if state.stage not in LIVE:
        return state
    why = f"{host} is lost: {why}"
    ranks = (replace(r, lost=why) if r.host == host and r.alive else r for r in state.ranks)
    return replace(state, ranks=tuple(ranks))


def _ask(state: State, why: str, now: float) -> tuple[State, Asked]:
    if not state.asked:
        return replace(state, asked=why), ()
    if state.stage in (Stage.RUNNING, Stage.EXAMINING, Stage.TERMINATING):
        outcome = asked_to_stop(state.ranks, state.speaks, f"{state.asked}, then {why}")
        return _stop(state, outcome, now)
    return state, ()


def _hear(state: State, event: x.Happening, number: int, now: float) -> State:
    """What an event of one process of the attempt tells."""
    rank = state.ranks[number]
    match event:
        case x.Dumped():
            undumped = state.undumped
            return state if undumped is None else replace(state, undumped=undumped - {number})
        case x.Progress(_, _, beat, at) if rank.alive and beat.changed_ns >= rank.beat.changed_ns:
            watch, pace = state.watches[number](rank.beat, beat, state.pace)
            watches = (*state.watches[:number], watch, *state.watches[number + 1 :])
            state = replace(state, watches=watches, pace=pace, speaks=True)
            rank = replace(rank, beat=beat, at=max(rank.at, min(at, now)))
            if rank.before_loop():
                rank = replace(rank, resumed=beat.completed)
        case x.Exited(_, _, code, at) if rank.alive:
            rank = replace(rank, code=code, left_at=min(at, now), stopped_at=None)
        case x.Stopped(_, _, at) if rank.alive:
            rank = replace(rank, stopped_at=min(at, now))
        case x.Continued(_, _, at):
            # The time it was stopped is not held against it.
            rank = replace(rank, stopped_at=None, at=max(rank.at, min(at, now)))
        case x.SpawnFailed(_, _, error) if rank.alive:
            rank = replace(rank, lost=f"could not be started: {error}", unstarted=True)
    ranks = (*state.ranks[:number], rank, *state.ranks[number + 1 :])
    return replace(state, ranks=ranks)


# What follows from it


def _advance(state: State, now: float) -> tuple[State, Asked]:
    """One move of the job, or the same state when there is none to make."""
    over = state.until is not None and now >= state.until
    match state.stage:
        case Stage.WAITING | Stage.BACKING_OFF if state.asked:
            why = f"asked to stop ({state.asked}) while no process ran; start again to go on"
            return _end(state, x.End(ExitCode.PREEMPTED, why))
        case Stage.WAITING:
            return _wait(state, now)
        case Stage.RUNNING:
            return _watch(state, now)
        case Stage.EXAMINING:
            return _examine(state, over, now)
        case Stage.TERMINATING if over or not any(rank.alive for rank in state.ranks):
            return _terminated(state, now)
        case Stage.STOPPING:
            return _prove(state, now)
        case Stage.BACKING_OFF if over:
            policy = state.policy
            limit = now + max(policy.host_s, policy.shrink_after_s)
            return replace(state, stage=Stage.WAITING, until=None, limit=limit), ()
    return state, ()


def _wait(state: State, now: float) -> tuple[State, Asked]:
    """Start the next attempt once the hosts for it are there.

    The first one waits for the hosts that were named for it, and then takes spares; it never
    starts with fewer, as whoever asked for them is there to hear of it.
    """
    policy, roster = state.policy, state.roster
    first, over = not state.hosts, now >= state.limit
    named = policy.hosts[: policy.wanted]
    if not first or over or roster.usable.issuperset(named):
        legal, patience_s = policy.legal[:1] if first else policy.legal, policy.shrink_after_s
        if hosts := roster.place(legal, state.hosts or named, 0.0 if over else patience_s, now):
            return _start(state, hosts, now)
    if over:
        missing = ", ".join(h.name for h in roster.hosts if not h.usable and not h.drained)
        longest_s = policy.host_s if first else max(policy.host_s, policy.shrink_after_s)
        return _end(state, x.End(ExitCode.FAILED, f"no agent on {missing} within {longest_s:g} s"))
    again = None if first else roster.look_again(policy.shrink_after_s, now)
    return _look_again(state, state.limit if again is None else min(again, state.limit))


def _start(state: State, hosts: tuple[str, ...], now: float) -> tuple[State, Asked]:
    placement = state.policy.placement(hosts)
    attempt = state.attempt + 1
    after = replace(
        state,
        roster=state.roster.used(hosts, attempt),
        stage=Stage.RUNNING,
        until=None,
        attempt=attempt,
        hosts=hosts,
        ranks=tuple(Rank(number, host, now) for number, host in enumerate(placement)),
        watches=(Stopwatch(),) * len(placement),
        pace=Pace(),
        undumped=None,
    )
    return after, (x.StartAttempt(attempt, placement),)


def _watch(state: State, now: float) -> tuple[State, Asked]:
    """A running attempt: is it over, to be stopped, or in trouble?"""
    if state.asked:
        return _terminate(state, now)
    if outcome := left_by_themselves(state.ranks, state.speaks):
        if outcome.code == ExitCode.OK:
            return _stop(state, outcome, now)
        since = max(rank.left_at or now for rank in state.ranks)
        return _fail(state, Cause("preempted", None, outcome.reason, since), outcome, now)
    if _in_trouble(state, now):
        settle_s = state.policy.settle_s if _ended_badly(state) else 0.0
        return replace(state, stage=Stage.EXAMINING, undumped=None, until=now + settle_s), ()
    grows_at = _grows_at(state)
    return _terminate(state, now) if grows_at is not None and now >= grows_at else (state, ())


def _terminate(state: State, now: float) -> tuple[State, Asked]:
    after = replace(state, stage=Stage.TERMINATING, until=now + state.policy.grace_s)
    return after, (x.Terminate(state.attempt),)


def _grows_at(state: State) -> float | None:
    """When a running attempt makes way for one on more hosts; a silent command knows no way."""
    after_s, policy = state.policy.grow_after_s, state.policy
    if after_s is None or not state.speaks:
        return None
    return state.roster.grows_at(policy.legal, len(state.hosts), after_s)


def _ended_badly(state: State) -> bool:
    """Whether a process has left as one that neither finished nor was preempted."""
    ended = (rank for rank in state.ranks if not rank.alive)
    return any(not r.left_well(state.speaks) and r.code != ExitCode.PREEMPTED for r in ended)


def _in_trouble(state: State, now: float) -> bool:
    wakes = due(state.ranks, state.pace, state.policy.deadlines, state.speaks)
    return _ended_badly(state) or (wakes is not None and now >= wakes)


def _examine(state: State, over: bool, now: float) -> tuple[State, Asked]:
    """Wait for late exits, then for dumps; then decide."""
    if not _in_trouble(state, now):  # it was only slow, and said so while it was looked at
        return replace(state, stage=Stage.RUNNING, until=None), ()
    living = frozenset(rank.rank for rank in state.ranks if rank.alive)
    if state.undumped is None and living:
        if not over:
            return state, ()
        until = now + state.policy.dump_s
        after = replace(state, undumped=living, until=until)
        return after, (x.Dump(state.attempt, tuple(sorted(living))),)
    if state.undumped and state.undumped & living and not over:
        return state, ()
    cause = find(state.ranks, state.pace, state.policy.deadlines, state.speaks, now)
    return _fail(state, cause, after_failure(cause, state.ranks), now)


def _fail(state: State, cause: Cause, outcome: Outcome, now: float) -> tuple[State, Asked]:
    """The attempt is over and the job is not complete."""
    budget = state.budget.after(state.ranks, cause.kind != "preempted", cause.fault)
    outcome = within(budget, outcome, state.policy.jitter)
    roster, told = state.roster, ()
    if not budget.repeated:
        roster, told = roster.judged(cause, state.hosts, state.attempt, state.policy.legal)
    if state.asked and isinstance(outcome.then, Again):
        why = f"asked to stop ({state.asked}) after attempt {state.attempt} failed"
        outcome = replace(outcome, then=x.End(ExitCode.PREEMPTED, f"{why}: {outcome.reason}"))
    after, actions = _stop(replace(state, budget=budget, roster=roster), outcome, now)
    news = (cause.detected(now), *told)
    return after, (*(x.Record(event) for event in news), *actions)


def _terminated(state: State, now: float) -> tuple[State, Asked]:
    """Every process was told to leave; they have, or their time is up."""
    stuck = late(state.ranks, state.policy.grace_s, now)
    if state.asked:
        outcome = asked_to_stop(state.ranks, state.speaks, state.asked)
        after, actions = _stop(state, outcome, now)
        return after, (x.Record(stuck.detected(now)), *actions) if stuck else actions
    if outcome := left_by_themselves(state.ranks, state.speaks):
        reason = outcome.reason and "every process saved and left, for more hosts"
        return _stop(state, replace(outcome, reason=reason), now)
    cause = stuck or find(state.ranks, state.pace, state.policy.deadlines, state.speaks, now)
    return _fail(state, cause, after_failure(cause, state.ranks), now)


def _stop(state: State, outcome: Outcome, now: float) -> tuple[State, Asked]:
    """Kill what is left: also the children of processes that have left by themselves."""
    limit = now + state.policy.kill_s
    after = replace(state, stage=Stage.STOPPING, until=limit, limit=limit, outcome=outcome)
    there, _ = state.roster.unproven(state.policy.lost_s, now)
    return after, tuple(x.Kill(state.attempt, host) for host in there)


def _prove(state: State, now: float) -> tuple[State, Asked]:
    """Nothing follows before no process of the attempt can be left."""
    there, until = state.roster.unproven(state.policy.lost_s, now)
    if not there and not until:
        return _stopped(replace(state, roster=state.roster.presume()), now)
    if there and now >= state.limit:
        why = f"processes of attempt {state.attempt} may still run on {', '.join(there)}"
        why += f" {state.policy.kill_s:g} s after SIGKILL: no other attempt is started"
        return _end(state, x.End(ExitCode.FAILED, why))
    return _look_again(state, min([state.limit] * bool(there) + until))


def _stopped(state: State, now: float) -> tuple[State, Asked]:
    """The attempt is over, and what was decided follows."""
    assert state.outcome is not None
    reason, then = state.outcome.reason, state.outcome.then
    roster, drained = state.roster.verdicts(state.ranks, state.attempt)
    events = (GangDead(), *drained, AttemptEnded(int(state.outcome.code), reason))
    records = tuple(x.Record(event) for event in events)
    state = replace(state, roster=roster)
    if isinstance(then, Again) and not roster.possible(state.policy.legal):
        bad = ", ".join(host.name for host in roster.hosts if host.drained)
        then = x.End(ExitCode.SUSPECT_HOST, f"too few hosts are left, drained: {bad}; {reason}")
    if isinstance(then, x.End):
        after, end = _end(state, then)
        return after, (*records, *end)
    return replace(state, stage=Stage.BACKING_OFF, until=now + then.pause_s), records


def _end(state: State, end: x.End) -> tuple[State, Asked]:
    return replace(state, stage=Stage.ENDED, until=None), (end,)


def _look_again(state: State, until: float) -> tuple[State, Asked]:
    return (state if until == state.until else replace(state, until=until)), ()
