"""Thousands of imagined lives of a job, and what must hold in each."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from jaxrel.exit_codes import ExitCode
from jaxrel.heartbeat import Beat
from jaxrel.supervise import core, hosts
from jaxrel.supervise import exchange as x
from jaxrel.supervise.core import Policy, Stage, State, begin, step, wake
from jaxrel.supervise.deadlines import Deadlines
from jaxrel.supervise.hosts import Host, Roster
from jaxrel.supervise.invariants import violations
from jaxrel.supervise.verdict import Budget
from tests.supervise.simulator import World

SEEDS = 1000


@pytest.mark.core
def test_every_job_ends_and_no_two_attempts_live() -> None:
    codes: Counter[int] = Counter()
    for seed in range(SEEDS):
        world = World(seed)
        world.live()
        assert world.ended is not None
        codes[world.ended.code] += 1
        if world.ended.code == 0:
            assert world.silent or world.done >= world.steps, world.fail("left too early")
        failed = sum(type(record).__name__ == "FailureDetected" for record in world.records)
        assert world.starts <= failed + world.growths + 1, world.fail(
            "started again without a failure"
        )
    # The sample has everything in it: ends of each kind that a job can have.
    assert codes.keys() >= {0, 64, 70, 75, 76, 77, 79}
    assert codes[0] > SEEDS / 3


BUGS: dict[str, tuple[Any, str, Any, str]] = {
    "uses drained hosts": (
        Host, "usable", property(lambda host: host.up and not host.presumed),
        "though drained|uses one of",
    ),
    "uses hosts that are not there": (
        Host, "usable", property(lambda host: not host.drained and not host.presumed), "not there",
    ),
    "does not wait for the proof of death": (
        Roster, "unproven", lambda *_: ([], []), "a new attempt beside",
    ),
    "forgets that a lost host's processes may live on": (
        Policy, "lost_s", property(lambda _: 0.01), "a new attempt beside",
    ),
    "overhears the verdict on a host": (
        Roster, "verdicts", lambda roster, *_: (roster, ()), "uses one of",
    ),
    "waits for ever": (
        core, "_look_again", lambda state, _: (state, ()), "without a deadline|deadline passed",
    ),
    "goes on with any number of hosts": (
        hosts, "largest", lambda legal, most: min(most, max(legal)), "not legal",
    ),
    "forgets a failure": (
        core, "within", lambda _, outcome, __: replace(outcome, reason=""), "is not decided",
    ),
}  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, says = BUGS[bug]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError, match=says):
        for seed in range(SEEDS):
            World(seed).live()


@pytest.mark.core
def test_whatever_comes_in_whatever_order() -> None:
    """Events that no world would send. Left alone then, the job comes to an end or runs on."""
    stages: Counter[Stage] = Counter()
    for seed in range(3000):
        r, now = random.Random(seed), 0.0
        names = tuple(f"host{n}" for n in range(r.choice((1, 2, 4))))
        spares = r.randrange(len(names))
        policy = Policy(
            names, r.choice((1, 2)), spares=spares, shrink_after_s=r.choice((0.0, 9.0)),
            grow_after_s=r.choice((None, 2.0)), drain_after=r.choice((1, 3)),
        )  # fmt: skip
        state = begin(policy, Budget(30, 30), 0, now)
        for left in range(200, 0, -1):
            now += r.choice((0.0, 0.1, 1.0, 10.0))
            event: x.Happening = x.Tick()
            if left > 100:
                event = anything(r, state, now)
            elif (wakes := wake(state)) is not None:
                now = max(now, wakes)
            state, actions = step(state, event, now)
            found = violations(state, now, actions)
            assert not found, f"seed {seed}: {found} after {event}"
            stages[state.stage] += 1
            if state.stage is Stage.ENDED:
                break
        assert state.stage is Stage.ENDED or wake(state) is None, f"seed {seed}: {state.stage}"
    assert stages.keys() == set(Stage)
    assert min(stages.values()) > 500


def anything(r: random.Random, state: State, now: float) -> x.Happening:
    """One event, often such that it concerns the attempt."""
    host = r.choice((*state.policy.hosts, "stranger"))
    at = (state.attempt - r.choice((0, 0, 0, 0, 1)), r.choice((0, 0, 1, 2, -1)))
    phase = r.choice(("start", "compile", "wait", "wait", "failed", "done"))
    beat = Beat(phase, r.randrange(9), r.randrange(9), int(now * 1e9), error="KeyError: 7")
    return r.choice((
        x.HostUp(host), x.HostUp(host), x.HostUp(host), x.HostLost(host, "gone"), x.Tick(),
        x.Progress(*at, beat, now), x.Progress(*at, beat, now - 1.0), x.Dumped(*at),
        x.Exited(*at, r.choice((0, 1, 75, 75, 76, -6, -9)), now), x.Stopped(*at, now),
        x.Continued(*at, now), x.Gone(at[0], host), x.Gone(at[0], host), x.Gone(at[0], host),
        x.SpawnFailed(*at, "no such file") if r.random() < 0.2 else x.Tick(),
        x.TerminateAsked("somebody") if r.random() < 0.02 else x.Tick(),
    ))  # fmt: skip


def test_a_seed_replays_a_life() -> None:
    first, second = World(17), World(17)
    first.live()
    second.live()
    assert first.log == second.log
    assert len(first.log) > 20


@pytest.mark.core
@pytest.mark.parametrize("seed", range(3))
def test_no_false_alarm_over_3000_healthy_steps(seed: int) -> None:
    """Irregular steps, now and then one that is ten times as long, evaluations and saves."""
    r, now = random.Random(seed), 0.0
    policy = Policy(("host0",), 2, Deadlines(5.0))
    state: State = begin(policy, Budget(), 0, now)
    state, actions = step(state, x.HostUp("host0"), now)
    assert isinstance(actions[0], x.StartAttempt)

    def passes(until: float) -> None:
        """Time, with every tick that the core asks for."""
        nonlocal state, now
        while (wakes := wake(state)) is not None and wakes < until:
            now = max(now, wakes)
            state, actions = step(state, x.Tick(), now)
            assert not actions, actions
        now = until
        assert state.stage is Stage.RUNNING

    def says(rank: int, phase: str, done: int, dispatched: int) -> None:
        nonlocal state
        beat = Beat(phase, done, dispatched, int(now * 1e9))
        state, actions = step(state, x.Progress(1, rank, beat, now), now)
        assert not actions
        assert not violations(state, now)

    for phase, seconds in (("start", 3.0), ("join", 20.0), ("restore", 40.0), ("compile", 60.0)):
        for rank in range(2):
            passes(now + r.uniform(0, 1))
            says(rank, phase, 0, int(phase == "compile"))
        passes(now + seconds)
    for done in range(1, 3001):
        for rank in range(2):
            says(rank, "data", done, done)
            passes(now + r.uniform(0, 0.05))
            says(rank, "wait", done, done + 1)
        slow = 4.9 if done % 97 == 0 else 1.0
        passes(now + r.lognormvariate(-1.5, 0.5) % 1 * slow)
        if done % 100 == 0:  # an evaluation together, then a save on rank 0 alone
            says(0, "evaluation", done + 1, done + 1)
            says(1, "evaluation", done + 1, done + 1)
            passes(now + 30.0)
            says(0, "checkpoint", done + 1, done + 1)
            says(1, "wait", done + 1, done + 1)
            passes(now + r.uniform(0, 60.0))
    assert state.stage is Stage.RUNNING
    assert state.pace.steps > 2900
    # And yet a hang is seen when there is one.
    for rank in range(2):
        says(rank, "wait", 3001, 3002)
    limit = policy.deadlines.limit_s("wait", state.pace)
    assert limit < 30.0
    until = now + limit + 0.01
    while (wakes := wake(state)) is not None and wakes < until and state.stage is Stage.RUNNING:
        now = wakes
        state, _ = step(state, x.Tick(), now)
    assert state.stage is Stage.EXAMINING


def test_back_off_and_budget_bound_a_job_that_never_gets_on() -> None:
    """A job whose only process dies at once, for ever."""
    now, pauses = 0.0, []
    state = begin(Policy(("host0",), jitter=0.0), Budget(100, 8), 0, now)
    state, actions = step(state, x.HostUp("host0"), now)
    for _ in range(8):
        state, _ = step(state, x.Exited(state.attempt, 0, 1, now), now)
        assert state.stage is Stage.STOPPING
        state, actions = step(state, x.Gone(state.attempt, "host0"), now)
        if state.stage is Stage.ENDED:
            break
        ended, started = now, state.stage is Stage.RUNNING
        while not started:
            wakes = wake(state)
            assert wakes is not None
            now = wakes
            state, actions = step(state, x.Tick(), now)
            started = state.stage is Stage.RUNNING
        pauses.append(now - ended)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0]
    end = actions[-1]
    assert isinstance(end, x.End)
    assert end.code == ExitCode.RESTARTS_EXHAUSTED
    assert "no new step in 8 attempts running" in end.reason
