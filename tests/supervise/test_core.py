"""Single moves of the core, each with what it must ask for."""

from dataclasses import replace
from typing import Any

import pytest

from jaxrel.events import AttemptEnded, FailureDetected, GangDead
from jaxrel.heartbeat import Beat
from jaxrel.supervise import exchange as x
from jaxrel.supervise.core import Policy, Stage, State, begin, step, wake
from jaxrel.supervise.deadlines import Deadlines
from jaxrel.supervise.invariants import violations
from jaxrel.supervise.verdict import Budget

TWO = Policy(("host0", "host1"), deadlines=Deadlines(10.0))


class Job:
    """A state, the time, and what was asked for since the last look."""

    def __init__(self, policy: Policy = TWO, budget: Budget | None = None) -> None:
        self.now = 0.0
        self.state: State = begin(policy, budget or Budget(), 0, self.now)
        self.asked: list[Any] = []

    def tell(self, *events: x.Happening) -> list[Any]:
        """What the core asks for."""
        self.asked = []
        for event in events:
            self.state, actions = step(self.state, event, self.now)
            assert not violations(self.state, self.now, actions)
            self.asked += actions
        return self.asked

    def tick(self, seconds: float) -> list[Any]:
        self.now += seconds
        return self.tell(x.Tick())

    def beat(self, rank: int, phase: str, done: int = 0, error: str = "") -> x.Progress:
        beat = Beat(phase, done, done, int(self.now * 1e9) + 1, True, error)
        return x.Progress(self.state.attempt, rank, beat, self.now)

    def exit(self, rank: int, code: int) -> x.Exited:
        return x.Exited(self.state.attempt, rank, code, self.now)

    def gone(self) -> list[Any]:
        hosts = self.state.policy.hosts
        return self.tell(*(x.Gone(self.state.attempt, host) for host in hosts))

    def recorded(self, kind: type[Any]) -> list[Any]:
        found = [action.event for action in self.asked if isinstance(action, x.Record)]
        return [event for event in found if isinstance(event, kind)]

    @property
    def end(self) -> x.End:
        (end,) = [action for action in self.asked if isinstance(action, x.End)]
        assert self.state.stage is Stage.ENDED
        assert wake(self.state) is None
        return end


def running(policy: Policy = TWO, budget: Budget | None = None) -> Job:
    """A job whose processes are in the loop, at step 5."""
    job = Job(policy, budget)
    assert job.tell(x.HostUp("host0")) == []
    job.tell(x.HostUp("host1"))
    start = x.StartAttempt(1, policy.placement(policy.hosts))
    assert job.asked == [start]
    for rank in range(len(policy.placement(policy.hosts))):
        job.tell(job.beat(rank, "compile"), job.beat(rank, "wait", 5))
    assert job.state.stage is Stage.RUNNING
    return job


def test_hosts_that_do_not_come_are_named() -> None:
    job = Job()
    job.tell(x.HostUp("host0"), x.HostUp("stranger"))
    job.tick(60.0)
    assert (job.end.code, job.end.reason) == (70, "no agent on host1 within 60 s")


@pytest.mark.core
def test_one_failure_from_exit_to_the_next_attempt() -> None:
    job = running()
    assert job.tell(job.exit(1, -9)) == []  # others may have left too
    assert job.tick(0.3) == [x.Dump(1, (0,))]
    assert job.tell(x.Dumped(1, 0))[1:] == [x.Kill(1, "host0"), x.Kill(1, "host1")]
    (failure,) = job.recorded(FailureDetected)
    assert (failure.kind, failure.rank, failure.host, failure.step) == ("signal", 1, "host1", 5)
    assert failure.after_s == 0.3
    assert job.tell(x.Gone(1, "host0"), x.Gone(1, "host0"), x.Gone(7, "host1")) == []
    job.tell(x.Gone(1, "host1"))
    assert [type(a.event) for a in job.asked[:2]] == [GangDead, AttemptEnded]
    assert job.asked[2:] == [x.StartAttempt(2, ("host0", "host1"))]


def test_dumps_are_not_waited_for_longer_than_they_may_take() -> None:
    job = running()
    job.tell(job.exit(1, 3))
    job.tick(0.3)
    assert job.tick(1.9) == []
    assert len(job.tick(0.1)) == 3
    assert job.state.stage is Stage.STOPPING


def test_all_dead_need_no_dump() -> None:
    job = running()
    job.tell(job.exit(1, 3))
    job.tell(job.exit(0, -6))
    assert job.recorded(FailureDetected)[0].following == [0]


def test_messages_of_an_older_attempt_change_nothing() -> None:
    job = running()
    job.tell(job.exit(1, 3), job.exit(0, 3))
    job.gone()
    assert job.state.attempt == 2
    before = job.state
    late = Beat("failed", 99, 99, 10**18)
    stale = (x.Exited(1, 0, 64, 0.0), x.Progress(1, 0, late, 0.0), x.Gone(1, "host0"),
             x.SpawnFailed(1, 0, "x"), x.Stopped(1, 0, 0.0), x.Dumped(1, 0),
             x.Exited(2, 7, 1, 0.0), x.Exited(2, -1, 1, 0.0))  # fmt: skip
    assert job.tell(*stale) == []
    assert job.state == before


def test_an_older_beat_does_not_undo_a_newer_one() -> None:
    job = running()
    old = job.beat(0, "data", 6)
    job.now += 1.0
    job.tell(job.beat(0, "wait", 7), old)
    assert job.state.ranks[0].beat.completed == 7


def test_without_proof_of_death_there_is_no_other_attempt() -> None:
    job = running()
    job.tell(job.exit(1, 3), job.exit(0, 3), x.Gone(1, "host0"))
    job.tick(30.0)
    assert job.end.code == 70
    assert "attempt 1 may still run on host1 30 s after SIGKILL" in job.end.reason


@pytest.mark.core
def test_a_lost_host_must_prove_its_part_when_it_is_back() -> None:
    job = running()
    job.tell(x.HostLost("host1", "closed"))
    job.tick(0.3)
    job.tell(x.Dumped(1, 0))
    assert (failure := job.recorded(FailureDetected)[0]).kind == "host_lost"
    assert (failure.rank, failure.host) == (1, "host1")
    assert job.asked[1:] == [x.Kill(1, "host0")]
    assert job.tell(x.Gone(1, "host0")) == []
    assert job.tell(x.HostUp("host1")) == [x.Kill(1, "host1")]
    job.tell(x.Gone(1, "host1"))
    assert job.asked[-1] == x.StartAttempt(2, ("host0", "host1"))


def test_a_host_that_is_lost_between_attempts_is_waited_for() -> None:
    job = running(budget=Budget(fruitless=1, best=99))
    job.tell(job.exit(1, 3), job.exit(0, 3))
    job.gone()
    assert job.state.stage is Stage.BACKING_OFF
    assert job.tell(x.HostLost("host1", "closed")) == []
    assert job.tick(1.0) == []
    assert job.state.stage is Stage.WAITING
    assert job.tell(x.HostUp("host1")) == [x.StartAttempt(2, ("host0", "host1"))]


def test_who_was_only_slow_goes_on() -> None:
    job = running()
    assert job.tick(10.0) == [x.Dump(1, (0, 1))]
    assert job.tell(job.beat(0, "wait", 6), job.beat(1, "wait", 6)) == []
    assert job.state.stage is Stage.RUNNING


def test_a_pause_is_no_stop() -> None:
    job = running()
    job.tell(x.Stopped(1, 1, job.now))
    job.tick(4.9)
    job.tell(x.Continued(1, 1, job.now))
    job.tick(5.2)
    assert job.state.stage is Stage.RUNNING
    job.tell(x.Stopped(1, 1, job.now))
    assert job.tick(5.0) == [x.Dump(1, (0, 1))]
    job.tick(2.0)
    assert (job.recorded(FailureDetected)[0].kind, job.state.stage) == ("stopped", Stage.STOPPING)


def test_the_last_to_leave_may_take_its_time_but_not_for_ever() -> None:
    job = running()
    job.tell(job.beat(0, "done", 9), job.exit(0, 0), job.beat(1, "stop", 9))
    assert job.tick(99.0) == []
    assert job.tick(1.0) == [x.Dump(1, (1,))]
    job.tick(2.0)
    failure = job.recorded(FailureDetected)[0]
    assert (failure.kind, failure.rank, failure.following) == ("hang", 1, [])


def test_exit_0_counts_once_it_is_known_that_the_command_reports() -> None:
    job = Job()
    job.tell(x.HostUp("host0"), x.HostUp("host1"))
    job.tell(job.exit(0, 0))
    assert job.state.stage is Stage.RUNNING
    job.tell(job.beat(1, "start"))
    assert job.state.stage is Stage.EXAMINING


def test_a_spawn_that_fails_is_a_failure() -> None:
    job = Job()
    job.tell(x.HostUp("host0"), x.HostUp("host1"))
    job.tell(x.SpawnFailed(1, 1, "train: permission denied"), job.exit(0, 1))
    failure = job.recorded(FailureDetected)[0]
    assert (failure.kind, failure.rank) == ("exit", 1)
    assert failure.detail.startswith("could not be started: train: permission denied")


@pytest.mark.parametrize("last", [75, 0])
def test_preempted_when_all_have_saved_even_if_not_at_once(last: int) -> None:
    job = running(budget=Budget(max_restarts=0))
    assert job.tell(job.exit(0, 75)) == []
    job.now += 8.0
    job.tell(job.beat(1, "done", 5), job.exit(1, last))
    assert job.recorded(FailureDetected)[0].kind == "preempted"
    job.gone()
    assert job.state.stage is Stage.RUNNING
    assert job.state.budget.failures == 0


@pytest.mark.parametrize(
    ("codes", "end"),
    [((0, 0), 0), ((75, 75), 75), ((0, 75), 75), ((75, -15), 70), ((75, 3), 70), ((77, 75), 77)],
)
def test_how_a_job_ends_that_was_asked_to_stop(codes: tuple[int, int], end: int) -> None:
    job = running()
    assert job.tell(x.TerminateAsked("SIGTERM")) == [x.Terminate(1)]
    for rank, code in enumerate(codes):
        job.now += 1.0
        job.tell(job.beat(rank, "done" if code == 0 else "stop", 5), job.exit(rank, code))
    job.gone()
    assert job.end.code == end
    if end == 70:
        assert "rank 1" in job.end.reason


def test_grace_ends_and_who_is_left_is_named() -> None:
    job = running(replace(TWO, grace_s=7.0))
    job.tell(x.TerminateAsked("SIGTERM"), job.exit(0, 75))
    job.tick(7.0)
    (failure,) = job.recorded(FailureDetected)
    assert (failure.kind, failure.rank, failure.host) == ("hang", 1, "host1")
    job.gone()
    assert job.end.reason == "asked to stop (SIGTERM): rank 1 had to be killed"


def test_asked_to_stop_when_there_is_nothing_to_stop() -> None:
    waiting = Job()
    waiting.tell(x.TerminateAsked("SIGINT"))
    assert waiting.end.code == 75
    failing = running()
    failing.tell(failing.exit(1, 3))
    failing.tell(x.TerminateAsked("SIGINT"))
    failing.tick(0.3)
    failing.tell(x.Dumped(1, 0))
    failing.gone()
    assert failing.end.code == 75
    assert "after attempt 1 failed: rank 1: exit" in failing.end.reason
    stopping = running()
    stopping.tell(stopping.exit(0, 3), stopping.exit(1, 3), x.TerminateAsked("SIGINT"))
    stopping.gone()
    assert (stopping.end.code, len(stopping.recorded(AttemptEnded))) == (75, 1)


def test_a_resume_is_no_progress() -> None:
    """A leader that starts on a run that stands at step 40, and never gets beyond."""
    job = Job(budget=Budget(max_no_progress=2))
    job.tell(x.HostUp("host0"), x.HostUp("host1"))
    for _ in range(2):
        for rank in range(2):
            job.tell(job.beat(rank, "restore", 40), job.beat(rank, "compile", 40))
            job.tell(job.beat(rank, "wait", 40))
        job.tell(job.exit(0, 1), job.exit(1, 1))
        job.gone()
    assert job.end.code == 79
    assert "no new step in 2 attempts running, the highest is 40" in job.end.reason
