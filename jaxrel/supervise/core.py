"""The decisions of the supervisor, as a pure function: `step(state, happening, now)`.

There is no clock, socket, process or random number in here: the leader feeds it what happens
and does what it asks for, and a simulator can feed it anything. Times are seconds of whoever
feeds it.

    waiting -> running -> examining -> stopping -> backing off -> waiting ...
                  |                       ^  |
                  +----> terminating -----+  +-> ended

What must hold after every event (`violations`): processes exist only in a stage that will see
to their end, and nothing waits without a deadline. The one exception is a command that has
never reported progress: nobody can tell a hang of it.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from jaxrel.events import AttemptEnded, FailureDetected, GangDead
from jaxrel.exit_codes import ExitCode
from jaxrel.supervise import exchange as x
from jaxrel.supervise.deadlines import Deadlines, Pace, Stopwatch, due
from jaxrel.supervise.ranks import Rank, names
from jaxrel.supervise.rootcause import Cause, find
from jaxrel.supervise.verdict import (
    Again,
    Budget,
    Outcome,
    after_failure,
    asked_to_stop,
    left_by_themselves,
    within,
)  # fmt: skip


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
class Policy:
    """What a job is and how long it waits for what, in seconds."""

    hosts: tuple[str, ...]
    processes_per_host: int = 1
    deadlines: Deadlines = field(default_factory=Deadlines)
    grace_s: float = 60.0
    """From SIGTERM to SIGKILL."""
    host_s: float = 60.0
    """For all agents to be there."""
    settle_s: float = 0.3
    """For other exits to arrive after one."""
    dump_s: float = 2.0
    kill_s: float = 30.0
    """From SIGKILL to the proof that no process is left."""
    jitter: float = 0.5
    """In [0, 1): spreads the pauses of jobs that fail together."""

    def placement(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(host for host in self.hosts for _ in range(self.processes_per_host))


@dataclass(frozen=True)
class State:
    """A job, as far as its leader knows."""

    policy: Policy
    budget: Budget = field(default_factory=Budget)
    stage: Stage = Stage.WAITING
    until: float | None = None
    """When the stage must be over; in `running`, see `wake`."""
    up: frozenset[str] = frozenset()
    attempt: int = 0
    """The last that was started."""
    ranks: tuple[Rank, ...] = ()
    watches: tuple[Stopwatch, ...] = ()
    pace: Pace = field(default_factory=Pace)
    speaks: bool = False
    """Whether the command has ever reported progress."""
    undumped: frozenset[int] | None = None
    """Ranks whose dump is awaited; None before it is asked for."""
    unproven: frozenset[str] = frozenset()
    """Hosts on which a process of the attempt may still exist."""
    outcome: Outcome | None = None
    """Of the last attempt that was stopped."""
    asked: str = ""
    """Why the job is to stop; empty while it is not."""


def begin(policy: Policy, budget: Budget, attempts: int, now: float) -> State:
    """A job whose run directory has seen `attempts` attempts."""
    return State(policy, budget, until=now + policy.host_s, attempt=attempts)


def wake(state: State) -> float | None:
    """When the job needs a `Tick` at the latest."""
    if state.stage is Stage.RUNNING:
        return due(state.ranks, state.pace, state.policy.deadlines, state.speaks)
    return state.until


def step(state: State, event: x.Happening, now: float) -> tuple[State, tuple[x.Action, ...]]:
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


def violations(state: State, now: float) -> list[str]:
    """What must never be, in words; for tests and the simulator."""
    found = []
    if state.stage not in LIVE and state.unproven:
        found.append(f"{state.stage}: processes may exist on {sorted(state.unproven)}")
    if state.stage in LIVE and state.stage is not Stage.STOPPING and not state.unproven:
        found.append(f"{state.stage}: no host has processes")
    if (wakes := wake(state)) is None:
        if state.stage not in (Stage.ENDED, Stage.RUNNING):
            found.append(f"{state.stage}: waits without a deadline")
        if state.stage is Stage.RUNNING and state.speaks:
            found.append("running: waits without a deadline")
    elif wakes <= now:
        found.append(f"{state.stage}: the deadline passed {now - wakes:g} s ago")
    if state.stage is Stage.STOPPING and state.outcome is None:
        found.append("stopping: what follows is not decided")
    return found


# What an event tells


def _take(state: State, event: x.Happening, now: float) -> tuple[State, tuple[x.Action, ...]]:
    match event:
        case x.HostUp(host) if host in state.policy.hosts:
            # A host that comes back while the gang is being stopped has yet to prove its part.
            again = state.stage is Stage.STOPPING and host in state.unproven
            kill = (x.Kill(state.attempt, host),) if again else ()
            return replace(state, up=state.up | {host}), kill
        case x.HostLost(host, why):
            return _lose(replace(state, up=state.up - {host}), host, why), ()
        case x.TerminateAsked(why):
            return _ask(state, why, now)
        case x.Gone(attempt, host) if attempt == state.attempt and state.stage is Stage.STOPPING:
            return replace(state, unproven=state.unproven - {host}), ()
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


def _lose(state: State, host: str, why: str) -> State:
    if state.stage not in LIVE:
        return state
    why = f"{host} is lost: {why}"
    ranks = (replace(r, lost=why) if r.host == host and r.alive else r for r in state.ranks)
    return replace(state, ranks=tuple(ranks))


def _ask(state: State, why: str, now: float) -> tuple[State, tuple[x.Action, ...]]:
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


def _advance(state: State, now: float) -> tuple[State, tuple[x.Action, ...]]:
    """One move of the job, or the same state when there is none to make."""
    over = state.until is not None and now >= state.until
    match state.stage:
        case Stage.WAITING if state.asked:
            return _end(state, _unstarted(state))
        case Stage.WAITING if state.up.issuperset(state.policy.hosts):
            return _start(state, now)
        case Stage.WAITING if over:
            missing = [host for host in state.policy.hosts if host not in state.up]
            why = f"no agent on {', '.join(missing)} within {state.policy.host_s:g} s"
            return _end(state, x.End(ExitCode.FAILED, why))
        case Stage.RUNNING:
            return _watch(state, now)
        case Stage.EXAMINING:
            return _examine(state, over, now)
        case Stage.TERMINATING if over or not any(rank.alive for rank in state.ranks):
            return _terminated(state, now)
        case Stage.STOPPING if not state.unproven:
            return _stopped(state, now)
        case Stage.STOPPING if over:
            hosts = ", ".join(sorted(state.unproven))
            why = f"processes of attempt {state.attempt} may still run on {hosts}"
            why += f" {state.policy.kill_s:g} s after SIGKILL: no other attempt is started"
            return _end(replace(state, unproven=frozenset()), x.End(ExitCode.FAILED, why))
        case Stage.BACKING_OFF if state.asked:
            return _end(state, _unstarted(state))
        case Stage.BACKING_OFF if over:
            until = now + state.policy.host_s
            return replace(state, stage=Stage.WAITING, until=until), ()
    return state, ()


def _start(state: State, now: float) -> tuple[State, tuple[x.Action, ...]]:
    hosts = state.policy.placement()
    attempt = state.attempt + 1
    after = replace(
        state,
        stage=Stage.RUNNING,
        until=None,
        attempt=attempt,
        ranks=tuple(Rank(number, host, now) for number, host in enumerate(hosts)),
        watches=(Stopwatch(),) * len(hosts),
        pace=Pace(),
        undumped=None,
        unproven=frozenset(hosts),
    )
    return after, (x.StartAttempt(attempt, hosts),)


def _watch(state: State, now: float) -> tuple[State, tuple[x.Action, ...]]:
    """A running attempt: is it over, to be stopped, or in trouble?"""
    if state.asked:
        until = now + state.policy.grace_s
        after = replace(state, stage=Stage.TERMINATING, until=until)
        return after, (x.Terminate(state.attempt),)
    if outcome := left_by_themselves(state.ranks, state.speaks):
        if outcome.code == ExitCode.OK:
            return _stop(state, outcome, now)
        since = max(rank.left_at or now for rank in state.ranks)
        return _fail(state, Cause("preempted", None, outcome.reason, since), outcome, now)
    if not _in_trouble(state, now):
        return state, ()
    settle_s = state.policy.settle_s if _ended_badly(state) else 0.0
    return replace(state, stage=Stage.EXAMINING, undumped=None, until=now + settle_s), ()


def _ended_badly(state: State) -> bool:
    """Whether a process has left as one that neither finished nor was preempted."""
    ended = (rank for rank in state.ranks if not rank.alive)
    return any(not r.left_well(state.speaks) and r.code != ExitCode.PREEMPTED for r in ended)


def _in_trouble(state: State, now: float) -> bool:
    wakes = due(state.ranks, state.pace, state.policy.deadlines, state.speaks)
    return _ended_badly(state) or (wakes is not None and now >= wakes)


def _examine(state: State, over: bool, now: float) -> tuple[State, tuple[x.Action, ...]]:
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


def _fail(
    state: State, cause: Cause, outcome: Outcome, now: float
) -> tuple[State, tuple[x.Action, ...]]:
    """The attempt is over and the job is not complete."""
    rank = cause.rank
    detected = FailureDetected(
        cause.kind,
        None if rank is None else rank.rank,
        None if rank is None else rank.host,
        cause.detail,
        None if cause.since is None else round(max(now - cause.since, 0.0), 6),
        list(cause.following),
        None if rank is None else rank.beat.completed,
    )
    budget = state.budget.after(state.ranks, counts=cause.kind != "preempted")
    outcome = within(budget, outcome, state.policy.jitter)
    if state.asked and isinstance(outcome.then, Again):
        why = f"asked to stop ({state.asked}) after attempt {state.attempt} failed"
        outcome = replace(outcome, then=x.End(ExitCode.PREEMPTED, f"{why}: {outcome.reason}"))
    after, actions = _stop(replace(state, budget=budget), outcome, now)
    return after, (x.Record(detected), *actions)


def _terminated(state: State, now: float) -> tuple[State, tuple[x.Action, ...]]:
    """Every process was told to leave; they have, or their time is up."""
    outcome = asked_to_stop(state.ranks, state.speaks, state.asked)
    after, actions = _stop(state, outcome, now)
    late = [rank for rank in state.ranks if rank.alive]
    if not late:
        return after, actions
    # Who has come further on the way out waits there for the rest.
    least = min(_way_out(rank) for rank in late)
    stuck = [rank for rank in late if _way_out(rank) == least]
    one = stuck[0] if len(stuck) == 1 else None
    grace_s = state.policy.grace_s
    detail = f"{names(stuck)} did not leave within {grace_s:g} s of SIGTERM"
    if one:
        detail += f", {one.where}"
    found = FailureDetected(
        "hang",
        None if one is None else one.rank,
        None if one is None else one.host,
        detail,
        grace_s,
        [rank.rank for rank in late if rank is not one],
        None if one is None else one.beat.completed,
    )
    return after, (x.Record(found), *actions)


def _way_out(rank: Rank) -> int:
    """How far it has come from the loop to having left."""
    phases = ("checkpoint", "stop", "done")
    return 1 + phases.index(rank.beat.phase) if rank.beat.phase in phases else 0


def _stop(state: State, outcome: Outcome, now: float) -> tuple[State, tuple[x.Action, ...]]:
    """Kill what is left: also the children of processes that have left by themselves."""
    until = now + state.policy.kill_s
    after = replace(state, stage=Stage.STOPPING, until=until, outcome=outcome)
    hosts = [host for host in state.policy.hosts if host in state.up]
    return after, tuple(x.Kill(state.attempt, host) for host in hosts)


def _stopped(state: State, now: float) -> tuple[State, tuple[x.Action, ...]]:
    assert state.outcome is not None
    ended = AttemptEnded(int(state.outcome.code), state.outcome.reason)
    records = (x.Record(GangDead()), x.Record(ended))
    then = state.outcome.then
    if isinstance(then, x.End):
        after, end = _end(state, then)
        return after, (*records, *end)
    return replace(state, stage=Stage.BACKING_OFF, until=now + then.pause_s), records


def _end(state: State, end: x.End) -> tuple[State, tuple[x.Action, ...]]:
    return replace(state, stage=Stage.ENDED, until=None), (end,)


def _unstarted(state: State) -> x.End:
    why = f"asked to stop ({state.asked}) while no process ran; start again to go on"
    return x.End(ExitCode.PREEMPTED, why)
