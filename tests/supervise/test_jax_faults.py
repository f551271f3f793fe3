"""Whatever happens to a job that trains, it ends in the bits of one that nobody touched.

Every job here is 2 processes x 4 devices, and several things go wrong in it one after the
other, one an attempt. `Launched.finish` sees to it that no process and no port is left.
"""

import json
import re
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxrel.cli import main
from jaxrel.events import AttemptStarted, FailureDetected, Finished, GangDead, Record
from jaxrel.ledger.reader import read
from tests.supervise import faulty, jobs
from tests.supervise.conftest import TWO_BY_FOUR
from tests.supervise.faulty import Fault
from tests.supervise.jobs import Launched, attempt_ends

FLAGS = (*TWO_BY_FOUR, "--max-no-progress", "9")
DEADLINE_S = 600.0

DEATHS = [
    (Fault("killed", 1, rank=1, step=3), "signal", "killed by SIGKILL in step, 1 steps"),
    (Fault("killed", 2, rank=0, step=6), "signal", "killed by SIGKILL in step, 4 steps"),
    (Fault("raises", 3, rank=1, step=7), "exception", "KeyError: 'no such token'"),
    (Fault("exits_with_0", 4, rank=0, step=8), "exit", "left before the run was complete, in"),
    (Fault("exits_from_a_thread", 5, rank=1, step=11), "exit", "left with exit code 3 in wait, 10"),
]
HANGS = [
    (Fault("stopped", 1, rank=0, step=3), "stopped", "stopped by a signal in step", "State: T"),
    (Fault("sleeps_for_ever", 2, rank=1, step=6), "hang", "in step, 4 steps", "sleeps_for_ever"),
    (
        Fault("sleeps_for_ever", 3, rank=0, step=10, at="data"),
        "hang", "in data, 8 steps", "sleeps_for_ever",
    ),
    (Fault("sleeps_for_ever", 4, rank=1, at="join"), "hang", "in join, 0", "sleeps_for_ever"),
]  # fmt: skip


@pytest.mark.slow
def test_every_death_is_seen_at_once_and_made_good(
    tmp_path: Path, compiled: Path, undisturbed: jobs.Finished
) -> None:
    run, last = tmp_path / "run", len(DEATHS) + 1
    faults = [fault for fault, *_ in DEATHS]
    faults.append(Fault("is_late", 5, rank=0, step=11))  # the other one waits for it
    faults.append(Fault("gets_sigterm", last, rank=1, step=13))
    command = faulty.train(run, compiled, *faults, evaluation__every=0)
    with Launched(run, command, *FLAGS) as launched:
        done = launched.finish(DEADLINE_S)
    assert done.code == 0, done.text
    assert attempt_ends(done) == [70] * len(DEATHS) + [75, 0]
    failures = detected(run)
    assert list(failures) == list(range(1, last + 1))
    for fault, kind, says in DEATHS:
        at, failure = failures[fault.attempt]
        check_named(failure, fault, kind, says)
        assert seconds(failure) < 3.0  # one, on a machine that has it to spare
        assert 0.0 < at - faulty.moment(run, fault) < 10.0
    survivor = run / "stacks" / "attempt-5-rank-0.txt"  # the others were gone as well by then
    assert "in is_late" in survivor.read_text()
    preempted = failures[last][1]
    assert (preempted.kind, preempted.rank) == ("preempted", None)
    check_same_bits(run, undisturbed)


@pytest.mark.slow
def test_every_hang_is_seen_by_its_deadline_and_made_good(
    tmp_path: Path, compiled: Path, undisturbed: jobs.Finished
) -> None:
    """And who is only slow to start, in the last attempt, is left alone."""
    run = tmp_path / "run"
    slow = Fault("sleeps_a_while", len(HANGS) + 1, rank=1, at="spawn")
    faults = [*(fault for fault, *_ in HANGS), slow]
    command = faulty.train(run, compiled, *faults, job__join_deadline_s=20, evaluation__every=0)
    with Launched(run, command, *FLAGS) as launched:
        done = launched.finish(DEADLINE_S)
    assert done.code == 0, done.text
    assert attempt_ends(done) == [70] * len(HANGS) + [0]
    failures = detected(run)
    assert list(failures) == list(range(1, len(HANGS) + 1))
    for fault, kind, says, stack in HANGS:
        at, failure = failures[fault.attempt]
        check_named(failure, fault, kind, says)
        limit_s = 5.0
        if found := re.search(r"the limit is ([\d.]+) s", failure.detail):
            limit_s = float(found[1])
        if fault.at == "join":  # the other one gave up before the deadline of this phase
            limit_s = 20.0
        assert 0.9 * limit_s <= seconds(failure) < limit_s + 5.0, failure
        assert abs(at - faulty.moment(run, fault) - seconds(failure)) < 2.0
        stacks = run / "stacks" / f"attempt-{fault.attempt}-rank-{fault.rank}.txt"
        assert stack in stacks.read_text()
    assert faulty.moment(run, slow) > failures[len(HANGS)][0]  # it was slow
    check_same_bits(run, undisturbed)


@pytest.mark.slow
def test_a_job_that_is_told_to_stop_does_and_goes_on_later(
    tmp_path: Path, compiled: Path, undisturbed: jobs.Finished
) -> None:
    """By SIGTERM to the leader: a worker that never stops, one that ignores the signal but stops
    with the others, and then a job whose first port is taken."""
    run = tmp_path / "run"
    pauses = [Fault("is_late", 1, rank=0, step=7), Fault("is_late", 2, rank=0, step=10)]
    stubborn, deaf = Fault("never_stops", 1, 1, step=3), Fault("ignores_sigterm", 2, 1, step=9)
    command = faulty.train(run, compiled, *pauses, stubborn, deaf, evaluation__every=0)
    with Launched(run, command, *FLAGS, "--grace", "8") as launched:
        ask_to_stop(launched, pauses[0])
        killed = launched.finish(DEADLINE_S)
    assert killed.code == 70, killed.text
    assert killed.reason == "asked to stop (SIGTERM): ranks 0, 1 had to be killed"
    # Rank 0 wanted to leave, and waited for rank 1 to leave with it.
    assert "rank 1 did not leave within 8 s of SIGTERM, in " in killed.failure.detail
    assert (killed.failure.kind, killed.failure.rank) == ("hang", 1)
    assert killed.failure.following == [0]
    assert len(killed.of(GangDead)) == 1

    with Launched(run, command, *FLAGS) as launched:
        ask_to_stop(launched, pauses[1])
        stopped = launched.finish(DEADLINE_S)
    assert stopped.code == 75, stopped.text
    assert stopped.reason == "asked to stop (SIGTERM): every process saved and left"

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = ("-m", "tests.supervise.faulty", str(port))
        with Launched(run, command, *FLAGS, program=program) as launched:
            launched.wait_for("attempt 4 on", DEADLINE_S)
            taken.close()
            done = launched.finish(DEADLINE_S)
    assert done.code == 0, done.text
    failure = detected(run)[3][1]
    assert (failure.kind, failure.rank, failure.host) == ("exception", 0, "host0")
    assert "Address already in use" in failure.detail
    third, fourth = done.of(AttemptStarted)[2:]
    assert third.coordinator == f"127.0.0.1:{port}" != fourth.coordinator
    check_same_bits(run, undisturbed)


def ask_to_stop(launched: Launched, pause: Fault) -> None:
    """SIGTERM to the leader, while the job pauses."""
    ends = time.monotonic() + DEADLINE_S
    while not faulty.note(launched.run, pause).exists():
        assert time.monotonic() < ends, launched.text
        assert launched.process.poll() is None, launched.text
        time.sleep(0.05)
    launched.process.send_signal(signal.SIGTERM)


def detected(run: Path) -> dict[int, tuple[float, FailureDetected]]:
    """When each failure was on record, in seconds since the epoch, and the failure, by attempt."""
    found: dict[int, tuple[float, FailureDetected]] = {}
    for record in read(run).records:
        if isinstance(record.event, FailureDetected):
            assert record.attempt not in found
            found[record.attempt] = (record.time_us / 1e6, record.event)
    return found


def check_named(failure: FailureDetected, fault: Fault, kind: str, says: str) -> None:
    assert (failure.kind, failure.rank, failure.host) == (kind, fault.rank, f"host{fault.rank}")
    assert says in failure.detail
    assert failure.following == [1 - fault.rank]


def seconds(failure: FailureDetected) -> float:
    """From when it happened to when it was detected."""
    assert failure.after_s is not None
    return failure.after_s


def check_same_bits(run: Path, undisturbed: jobs.Finished) -> None:
    """By the workers' own word, and by the report, which has every failure as well."""
    own, other = report(run), report(undisturbed.run)
    assert own["status"] == "finished"
    assert own["final_state_digest"] == other["final_state_digest"] == last_digest(run)
    assert own["steps"] == other["steps"] == 16
    told = [(f["attempt"], f["kind"], f["rank"], f["host"]) for f in own["failures"]]
    assert told == [(n, f.kind, f.rank, f.host) for n, (_, f) in detected(run).items()]
    assert all(f["recovered_after_s"] for f in own["failures"])
    total_s = own["effective_s"] + sum(own["badput_s"].values())
    assert round(total_s - own["wall_s"], 6) == 0


def last_digest(run: Path) -> str:
    """What both ranks said when they had finished."""
    records: Iterable[Record] = read(run).records
    said = {r.source: r.event.state_digest for r in records if isinstance(r.event, Finished)}
    assert set(said) == {"rank0", "rank1"}
    assert len(set(said.values())) == 1
    return said["rank0"]


def report(run: Path) -> dict[str, Any]:
    """What `jaxrel report --json` prints."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lines.append)
        assert main(["report", str(run), "--json"]) == 0
    return json.loads(lines[0])
