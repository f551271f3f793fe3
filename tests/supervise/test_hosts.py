"""Which hosts an attempt gets, what speaks against one, and what the job does without it."""

from itertools import product

import pytest

from jaxrel.events import FailureDetected, HostDrained
from jaxrel.supervise import exchange as x
from jaxrel.supervise.core import Stage
from jaxrel.supervise.hosts import Host, Roster, by_chance
from jaxrel.supervise.policy import Policy, divisors
from jaxrel.supervise.ranks import Rank
from jaxrel.supervise.verdict import Budget
from tests.supervise.test_core import Job

MANY = Budget(99, 99)


def policy(wanted: int, spares: int = 0, **more: object) -> Policy:
    names = tuple(f"host{n}" for n in range(wanted + spares))
    return Policy(names, spares=spares, **more)  # type: ignore[arg-type]


def started(wanted: int, spares: int = 0, **more: object) -> Job:
    """A job that runs on the hosts that were named for it."""
    job = Job(policy(wanted, spares, **more), MANY)
    job.tell(*(x.HostUp(name) for name in job.state.policy.hosts))
    assert job.state.hosts == job.state.policy.hosts[:wanted]
    return job


def gets_on(job: Job) -> None:
    for number in range(len(job.state.ranks)):
        job.tell(job.beat(number, "wait", 100 * job.state.attempt))


def fails(job: Job, rank: int, code: int = 3) -> None:
    """The attempt gets on, a rank begins to fail, and all processes are gone."""
    gets_on(job)
    job.tell(job.exit(rank, code))
    job.tick(0.3)
    job.tick(2.0)
    asked = job.asked
    job.tell(*(x.Gone(job.state.attempt, name) for name in job.state.hosts))
    job.asked = asked + job.asked


def loses(job: Job, name: str) -> None:
    """A host is lost after some steps, and its backend sees that nothing is left there."""
    gets_on(job)
    job.tell(x.HostLost(name, "gone"), x.Gone(job.state.attempt, name))
    job.tick(0.3)
    job.tick(2.0)
    job.gone()


@pytest.mark.core
def test_a_lost_host_is_replaced_at_once_and_the_others_keep_their_ranks() -> None:
    job = started(3, spares=2)
    loses(job, "host1")
    assert job.asked[-1] == x.StartAttempt(2, ("host0", "host3", "host2"))
    job.tell(x.HostUp("host1"))
    loses(job, "host0")  # host1 comes before host4 in the job's order
    assert job.state.hosts == ("host1", "host3", "host2")


@pytest.mark.core
def test_without_a_spare_a_lost_host_is_waited_for_and_then_fewer_must_do() -> None:
    job = started(4, shrink_after_s=60.0)
    loses(job, "host2")  # it has been away for 2.3 s
    assert job.state.stage is Stage.WAITING
    assert job.tick(57.6) == []
    assert job.tick(0.1) == [x.StartAttempt(2, ("host0", "host1"))]
    # The patience is with the loss, not with each attempt: the next one does not wait again.
    fails(job, 0)
    assert job.state.hosts == ("host0", "host1")


def test_who_is_back_in_time_is_used() -> None:
    job = started(2)
    loses(job, "host1")
    job.tick(50.0)
    assert job.tell(x.HostUp("host1"))[-1] == x.StartAttempt(2, ("host0", "host1"))


@pytest.mark.core
def test_a_smaller_attempt_is_left_alone_and_the_next_one_grows() -> None:
    job = started(2, shrink_after_s=0.0)
    loses(job, "host0")
    assert job.state.hosts == ("host1",)
    job.tell(x.HostUp("host0"))
    job.tick(9.0)
    assert (job.state.stage, job.state.attempt) == (Stage.RUNNING, 2)
    fails(job, 0)
    assert job.state.hosts == ("host1", "host0")


def test_a_smaller_attempt_makes_way_once_hosts_have_been_back_for_long() -> None:
    job = started(2, shrink_after_s=0.0, grow_after_s=9.0)
    loses(job, "host0")
    job.tell(job.beat(0, "wait", 7), x.HostUp("host0"))
    assert job.tick(8.9) == []
    assert job.tick(0.2) == [x.Terminate(2)]
    failures = job.state.budget.failures
    job.tell(job.beat(0, "stop", 8), job.exit(0, 75))
    assert job.recorded(FailureDetected) == []
    job.gone()
    assert job.asked[-1] == x.StartAttempt(3, ("host1", "host0"))
    assert job.state.budget.failures == failures
    job.tick(50.0)
    assert job.state.attempt == 3  # there is nothing to grow to


@pytest.mark.parametrize(("code", "kind"), [(-9, "signal"), (None, "hang")])
def test_who_fails_to_make_way_is_a_failure(code: int | None, kind: str) -> None:
    job = started(2, shrink_after_s=0.0, grow_after_s=9.0, grace_s=5.0)
    loses(job, "host0")
    job.tell(job.beat(0, "wait", 7), x.HostUp("host0"))
    assert job.tick(9.0) == [x.Terminate(2)]
    if code is None:
        job.tick(5.0)
    else:
        job.tell(job.exit(0, code))
    assert [failure.kind for failure in job.recorded(FailureDetected)] == [kind]
    job.gone()
    assert job.state.hosts == ("host1", "host0")


@pytest.mark.core
def test_a_hardware_verdict_drains_and_what_is_left_goes_on_at_once() -> None:
    job = started(2, spares=1)
    fails(job, 1, 76)
    (drained,) = job.recorded(HostDrained)
    assert (drained.host, drained.reason) == (
        "host1", "rank 1 of attempt 1 left with exit code 76",
    )  # fmt: skip
    assert job.state.hosts == ("host0", "host2")
    job.tell(x.HostLost("host1", "switched off"), x.HostUp("host1"))
    fails(job, 1, 76)
    assert job.state.hosts == ("host0",)  # nobody is waited for: none can come
    fails(job, 0, 76)
    assert job.end.code == 76
    assert job.end.reason.startswith("too few hosts are left, drained: host0, host1, host2; rank 0")


def test_a_verdict_that_comes_when_all_is_being_stopped_counts() -> None:
    job = started(2, spares=1)
    job.tell(job.exit(0, 3))
    job.tick(0.3)
    job.tick(2.0)
    assert job.state.stage is Stage.STOPPING
    job.tell(job.exit(1, 76))
    job.gone()
    assert job.state.hosts == ("host0", "host2")


def test_fewer_than_the_least_end_the_job() -> None:
    job = started(2, counts=(2,))
    fails(job, 1, 76)
    assert (job.end.code, job.state.attempt) == (76, 1)
    waiting = started(2, counts=(2,))
    loses(waiting, "host1")
    waiting.tick(60.0)
    assert (waiting.end.code, waiting.end.reason) == (70, "no agent on host1 within 60 s")


@pytest.mark.core
def test_who_keeps_failing_first_is_drained_once_a_sound_host_can_take_its_place() -> None:
    job = started(2, spares=1)
    fails(job, 1)
    fails(job, 0)
    fails(job, 1)
    assert job.state.hosts == ("host0", "host1")
    job.tell(x.HostLost("host2", "gone"))
    fails(job, 1)  # nothing can take its place, and 3 of 4 on two hosts may be chance
    assert job.state.hosts == ("host0", "host1")
    job.tell(x.HostUp("host2"))
    fails(job, 1)
    (drained,) = job.recorded(HostDrained)
    assert drained.reason == "4 of 5 failures in the last 10 attempts began on it"
    assert job.state.hosts == ("host0", "host2")


def test_what_chance_does_not_explain_drains_without_a_spare() -> None:
    job = started(16)
    for _ in range(3):
        assert job.recorded(HostDrained) == []
        fails(job, 5)
    assert [event.host for event in job.recorded(HostDrained)] == ["host5"]
    assert len(job.state.hosts) == 8
    alone = started(1)
    for _ in range(12):
        fails(alone, 0)
    assert (alone.state.attempt, alone.state.stage) == (13, Stage.RUNNING)


def test_old_failures_and_those_that_are_no_hosts_fault_do_not_count() -> None:
    job = started(2, spares=1)
    fails(job, 1)
    fails(job, 1)
    for _ in range(9):
        gets_on(job)
        job.tell(job.exit(0, 75), job.exit(1, 75))
        job.gone()
    fails(job, 1)
    fails(job, 1)
    assert job.state.hosts == ("host0", "host1")
    for step in range(4):
        job.tell(job.beat(1, "failed", 9000 + step, "MemoryError: out of memory"), job.exit(1, 70))
        job.tick(0.3)
        job.tick(2.0)
        job.gone()
    assert job.state.hosts == ("host0", "host1")


@pytest.mark.core
def test_the_same_exception_at_the_same_step_is_not_hardware() -> None:
    def job_of(*attempts: tuple[int, int, str]) -> Job:
        job = started(2, spares=1, drain_after=1)
        for rank, step, error in attempts:
            for number in range(2):
                job.tell(job.beat(number, "wait", step))
            job.tell(job.beat(rank, "failed", step, error), job.exit(rank, 70))
            job.tick(0.3)
            job.tick(2.0)
            job.gone()
        return job

    key = "KeyError: <Token at 0x7f01>"
    again = job_of((0, 7, key), (1, 7, "KeyError: <Token at 0x6abc>"))
    assert again.end.code == 79
    assert again.end.reason.startswith("the same exception at step 7 twice: not hardware; the last")
    assert again.recorded(HostDrained) == []
    for other in ((0, 7, "ValueError: 3"), (0, 9, key)):
        assert job_of((0, 7, key), other).state.stage is not Stage.ENDED
    # What names a peer is the peer's death, which may be anything's fault.
    peer = "XlaRuntimeError: Gloo all-reduce failed: Connection closed by peer"
    assert job_of((0, 7, peer), (0, 7, peer)).state.stage is not Stage.ENDED


def test_an_exception_that_an_attempt_got_beyond_is_a_new_one() -> None:
    fault = ("KeyError: 7", 7)
    budget = Budget().after(ranks_at(7), True, fault)
    assert budget.after(ranks_at(5), True).after(ranks_at(7), True, fault).repeated
    assert not budget.after(ranks_at(9), True).after(ranks_at(7), True, fault).repeated


def ranks_at(done: int) -> tuple[Rank, ...]:
    job = started(1)
    job.tell(job.beat(0, "wait", done))
    return job.state.ranks


def test_the_first_attempt_waits_for_the_hosts_that_were_named_for_it() -> None:
    job = Job(policy(2, spares=1))
    assert job.tell(x.HostUp("host2"), x.HostUp("host0")) == []
    assert job.tick(59.9) == []
    assert job.tick(0.1) == [x.StartAttempt(1, ("host0", "host2"))]
    short = Job(policy(2))
    short.tell(x.HostUp("host0"))
    short.tick(60.0)
    assert short.end.code == 70


def test_a_lost_host_counts_as_clear_when_its_lease_is_over_and_looks_when_it_is_back() -> None:
    job = started(2, shrink_after_s=0.0, lease_s=30.0)
    job.tell(x.HostLost("host1", "cut off"))
    job.tick(0.3)
    job.tick(2.0)
    job.tell(x.Gone(1, "host0"))
    assert job.tick(37.6) == []
    assert job.tick(0.1)[-1] == x.StartAttempt(2, ("host0",))
    assert job.tell(x.HostUp("host1")) == [x.Kill(1, "host1")]
    fails(job, 0)
    assert job.state.hosts == ("host0",)
    job.tell(x.Gone(1, "host1"))
    fails(job, 0)
    assert job.state.hosts == ("host0", "host1")


@pytest.mark.parametrize(
    ("mine", "failures", "hosts"), [(3, 3, 16), (3, 5, 4), (2, 6, 3), (1, 1, 2)]
)
def test_chance_by_counting_every_way_in_which_failures_may_fall(
    mine: int, failures: int, hosts: int
) -> None:
    ways = list(product(range(hosts), repeat=failures))
    on_one = sum(way.count(0) >= mine for way in ways) / len(ways)
    assert by_chance(mine, failures, hosts) == pytest.approx(min(1.0, hosts * on_one))


def test_a_suspect_host_is_used_last() -> None:
    blamed = {"host0": (1, 2, 3)}
    hosts = tuple(Host(f"host{n}", 0.0, True, blamed=blamed.get(f"host{n}", ())) for n in range(3))
    assert Roster(hosts, 3).place((2, 1), ("host0", "host1"), 0.0, 9.0) == ("host2", "host1")
    assert Roster(hosts, 3).place((3, 1), ("host0", "host1"), 0.0, 9.0) == (
        "host0", "host1", "host2",
    )  # fmt: skip


def test_numbers_of_hosts() -> None:
    assert divisors(8) == (8, 4, 2, 1)
    assert divisors(6, 2) == (6, 3, 2)
    with pytest.raises(ValueError, match="counts"):
        policy(4, counts=(2, 4))
    with pytest.raises(ValueError, match="spares"):
        Policy(("host0",), spares=1)
    with pytest.raises(ValueError, match="lease_s"):
        policy(1, lease_s=10.0)
