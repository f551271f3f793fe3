"""Real processes that fail in every way: who is named, how soon, and that nothing is left."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrel.events import AttemptStarted, FailureDetected, GangDead, JobEnded, JobStarted
from tests.supervise.jobs import (
    Launched,
    agent_of,
    attempt_ends,
    launch,
    processes_of,
    worker,
)

TWO = ("--hosts", "2")
PAIR = ("--processes-per-host", "2")


@pytest.mark.core
def test_every_death_is_seen_at_once_and_the_gang_restarted(tmp_path: Path) -> None:
    expected = [
        ("exits_3", "exit", "left with exit code 3"),
        ("exits_at_once", "exit", "left with exit code 1"),
        ("exits_early", "exit", "left before the run was complete"),
        ("killed", "signal", "killed by SIGKILL"),
        ("raises", "exception", "KeyError: 'no such token'"),
        ("runs_out", "oom", "MemoryError: out of memory"),
        ("aborts", "signal", "SIGABRT"),
    ]
    plan = worker(steps=18, rank=1, faults=[fault for fault, _, _ in expected])
    done = launch(tmp_path / "run", plan, *TWO)
    assert done.code == 0, done.text
    assert attempt_ends(done) == [70] * len(expected) + [0]
    failures = done.of(FailureDetected)
    for number, ((_, kind, says), failure) in enumerate(zip(expected, failures, strict=True), 1):
        assert (failure.kind, failure.rank, failure.host) == (kind, 1, "host1")
        assert says in failure.detail
        assert failure.step == 2 * number
        assert failure.following == [0]
        assert 0.3 <= failure.after_s < 1.0
        # Rank 0 was waiting for rank 1, and said where before it was killed.
        stacks = done.run / "stacks" / f"attempt-{number}-rank-0.txt"
        assert "in meet" in stacks.read_text()
        assert f"launch: attempt {number}: rank 1 on host1: {kind}: {failure.detail}" in done.text
    assert len({event.coordinator for event in done.of(AttemptStarted)}) == len(expected) + 1
    order = [type(e).__name__ for e in done.events if not isinstance(e, (JobStarted, JobEnded))]
    attempt = ["AttemptStarted", "FailureDetected", "GangDead", "AttemptEnded"]
    assert order == attempt * len(expected) + [n for n in attempt if n != "FailureDetected"]


@pytest.mark.core
def test_a_process_that_does_nothing_is_found(tmp_path: Path) -> None:
    expected = [
        ("sleeps_in_step", "hang", "in step", "in sleeps_in_step"),
        ("sleeps_in_data", "hang", "in data", "in sleeps_in_data"),
        ("stopped", "stopped", "stopped by a signal", "State: T"),
    ]
    plan = worker(rank=1, faults=[fault for fault, *_ in expected])
    done = launch(tmp_path / "run", plan, *TWO, "--hang-floor", "2")
    assert done.code == 0, done.text
    failures = done.of(FailureDetected)
    for number, (wanted, failure) in enumerate(zip(expected, failures, strict=True), 1):
        _, kind, says, stack = wanted
        assert (failure.kind, failure.rank, failure.host) == (kind, 1, "host1")
        assert says in failure.detail
        assert 2.0 <= failure.after_s < 4.0
        assert stack in (done.run / "stacks" / f"attempt-{number}-rank-1.txt").read_text()


def test_children_of_a_dead_process_die_with_it(tmp_path: Path) -> None:
    plan = worker(faults=["leaves_children"], dumps=False, rank=1)
    done = launch(tmp_path / "run", plan, *TWO)  # which looks for what is left
    assert (done.code, attempt_ends(done)) == (0, [70, 0])
    # Rank 0 could not write its stacks: the kernel's view of it is there.
    seen = (done.run / "stacks" / "attempt-1-rank-0.txt").read_text()
    assert "waits in" in seen
    assert "State: " in seen


def test_slow_start_is_no_failure(tmp_path: Path) -> None:
    done = launch(tmp_path / "run", worker(slow_start_s=2.0), *PAIR, "--hang-floor", "0.5")
    assert (done.code, done.attempts) == (0, 1), done.text


def test_a_command_that_reports_nothing_is_run_as_well(tmp_path: Path) -> None:
    done = launch(tmp_path / "run", ["sleep", "1"], *PAIR, "--hang-floor", "0.1")
    assert (done.code, done.attempts) == (0, 1), done.text


@pytest.mark.core
def test_what_a_restart_would_not_help_ends_the_job(tmp_path: Path) -> None:
    done = launch(tmp_path / "run", worker(rank=1, faults=["exits_77"]), *PAIR)
    assert (done.code, done.attempts) == (77, 1), done.text
    assert (done.failure.kind, done.failure.rank) == ("diverged", 1)
    assert "ended with 77: rank 1: diverged: left with exit code 77" in done.text


@pytest.mark.core
def test_a_preempted_job_starts_again_and_it_costs_nothing(tmp_path: Path) -> None:
    plan = worker(rank=-1, faults=["exits_75"])
    done = launch(tmp_path / "run", plan, *PAIR, "--max-restarts", "0")
    assert done.code == 0, done.text
    assert attempt_ends(done) == [75, 0]
    assert (done.failure.kind, done.failure.rank) == ("preempted", None)


def test_restarts_are_limited(tmp_path: Path) -> None:
    plan = worker(faults=["exits_3"] * 9, at=1)
    done = launch(tmp_path / "run", plan, "--max-restarts", "1")
    assert (done.code, done.attempts) == (79, 2)
    assert done.reason.startswith("restarts: all 1 are used; the last attempt: rank 0: exit")
    assert done.reason in done.text


def test_no_progress_ends_the_job(tmp_path: Path) -> None:
    """The first attempt comes to step 4; then it dies there each time."""
    plan = worker(faults=["exits_3"] * 9, at=4, every=0)
    done = launch(tmp_path / "run", plan, "--max-no-progress", "2")
    assert (done.code, done.attempts) == (79, 3)
    assert "no progress: no new step in 2 attempts running, the highest is 4" in done.reason


def test_attempts_are_numbered_on_by_the_next_launch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    failed = launch(run, worker(faults=["exits_65"]))
    again = launch(run, worker())
    assert (failed.code, again.code) == (65, 0)
    assert (failed.failure.kind, failed.failure.rank) == ("exit", 0)
    assert (run / "logs" / "attempt-2-rank-0.log").read_text().startswith("step 3\n")


@pytest.mark.core
def test_sigterm_to_the_leader_ends_75_when_all_have_saved(tmp_path: Path) -> None:
    with Launched(tmp_path / "run", worker(steps=10_000), *TWO) as launched:
        launched.wait_for("step 3")
        launched.process.send_signal(signal.SIGTERM)
        done = launched.finish(10)
    assert done.code == 75, done.text
    assert "asked to stop (SIGTERM): every process saved and left" in done.reason
    assert attempt_ends(done) == [75]


def test_who_ignores_sigterm_is_named_and_killed(tmp_path: Path) -> None:
    plan = worker(steps=10_000, rank=1, faults=["ignores_sigterm"])
    with Launched(tmp_path / "run", plan, *TWO, "--grace", "1") as launched:
        launched.wait_for("step 5")
        launched.process.send_signal(signal.SIGINT)
        done = launched.finish(10)
    assert done.code == 70
    assert "asked to stop (SIGINT): rank 1 had to be killed" in done.reason
    assert (done.failure.kind, done.failure.rank) == ("hang", 1)
    assert len(done.of(GangDead)) == 1


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    plan = worker(steps=10_000, rank=-1, faults=["ignores_sigterm"])
    with Launched(tmp_path / "run", plan, *PAIR) as launched:
        launched.wait_for("step 5")
        launched.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        launched.process.send_signal(signal.SIGHUP)
        done = launched.finish(10)
    assert done.code == 70
    assert "SIGTERM, then SIGHUP): ranks 0, 1 had to be killed" in done.reason


def test_who_asks_twice_by_ctrl_c_gets_130(tmp_path: Path) -> None:
    plan = worker(steps=10_000, rank=-1, faults=["ignores_sigterm"])
    with Launched(tmp_path / "run", plan, *PAIR) as launched:
        launched.wait_for("step 5")
        for _ in range(2):
            launched.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert launched.finish(10).code == 130


@pytest.mark.core
def test_a_second_launch_is_refused_and_leaves_the_first_ones_record_alone(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    with Launched(run, worker(steps=60), *TWO) as launched:
        launched.wait_for("step 3")
        before = sorted([*run.glob("ledger/*"), *run.glob("logs/*")])
        command = [sys.executable, "-m", "jaxrel", "launch", "--dir", str(run), "--", "true"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert second.returncode == 64
        assert f"--dir: got '{run}': another launch is supervising a job there" in second.stderr
        assert sorted([*run.glob("ledger/*"), *run.glob("logs/*")]) == before != []
        done = launched.finish(60)
    assert done.code == 0, done.text
    assert len(done.of(JobStarted)) == 1


@pytest.mark.core
def test_nothing_outlives_a_leader_that_is_killed(tmp_path: Path) -> None:
    """The agents see it, and end the workers and their children."""
    plan = worker(steps=10_000, rank=-1, faults=["keeps_a_child"])
    with Launched(tmp_path / "run", plan, *TWO) as launched:
        launched.wait_for("step 5")
        assert len(list(processes_of(launched.run))) == 7  # leader, 2 agents, 2 workers, 2 children
        launched.process.kill()
        all_are_gone(launched)


def test_workers_end_with_their_agent_when_nobody_is_left_to_end_them(tmp_path: Path) -> None:
    with Launched(tmp_path / "run", worker(steps=10_000), *TWO) as launched:
        launched.wait_for("step 3")
        agents = [agent_of(launched.run, host) for host in ("host0", "host1")]
        assert len(list(processes_of(launched.run))) == 5  # leader, 2 agents, 2 workers
        for pid in (launched.process.pid, *agents):
            os.kill(pid, signal.SIGSTOP)  # so that none of them sees another one go
        for pid in (*agents, launched.process.pid):
            os.kill(pid, signal.SIGKILL)
        all_are_gone(launched)


def all_are_gone(launched: Launched) -> None:
    launched.process.wait()
    ends = time.monotonic() + 10
    while left := list(processes_of(launched.run)):
        assert time.monotonic() < ends, left
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_is_lost_costs_one_attempt(tmp_path: Path, number: signal.Signals) -> None:
    plan = worker(steps=60 if number == signal.SIGKILL else 200)
    with Launched(tmp_path / "run", plan, *TWO, "--hang-floor", "5") as launched:
        launched.wait_for("step 3")
        os.kill(agent_of(launched.run, "host1"), number)
        done = launched.finish()
    assert done.code == 0, done.text
    failure = done.failure
    assert (failure.kind, failure.rank, failure.host) == ("host_lost", 1, "host1")
    assert attempt_ends(done) == [70, 0]


PICKS_A_TAKEN_PORT = """
import sys
from jaxrel.cli import main
from jaxrel.supervise import launch
fresh = launch.fresh_ports()
ports = iter([{port}])
launch.fresh_ports = lambda: lambda: next(ports, 0) or fresh()
sys.exit(main())
"""


def test_a_port_that_is_taken_costs_one_attempt(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        program = ("-c", PICKS_A_TAKEN_PORT.format(port=port))
        run, plan = tmp_path / "run", worker(listens=True)
        with Launched(run, plan, *PAIR, program=program) as launched:
            launched.wait_for("attempt 2")
            taken.close()
            done = launched.finish()
    assert done.code == 0, done.text
    assert done.failure.rank == 0
    assert "Address already in use" in done.failure.detail
    first, second = (event.coordinator for event in done.of(AttemptStarted))
    assert first == f"127.0.0.1:{port}"
    assert second != first


def test_a_stranger_is_not_heard(tmp_path: Path) -> None:
    with Launched(tmp_path / "run", worker(steps=100)) as launched:
        launched.wait_for("step 1")
        words = Path(f"/proc/{agent_of(launched.run, 'host0')}/cmdline").read_bytes().split(b"\0")
        leader = words[words.index(b"--leader") + 1].decode()
        host, _, port = leader.rpartition(":")
        assert host == "127.0.0.1"
        for line in (b'{"is": "Hello", "host": "host0", "token": "guessed"}\n', b"GET / HTTP\n"):
            with socket.create_connection((host, int(port)), timeout=5.0) as stranger:
                stranger.sendall(line + b'{"is": "TerminateAsked", "why": "mischief"}\n')
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        refused = subprocess.run(
            [sys.executable, "-m", "jaxrel.cli", "agent", "--leader", leader, "--host", "host0"],
            env=os.environ | {"JAXREL_TOKEN": "guessed"},
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert refused.returncode == 70
        assert "refused it: expected a host of the job" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
        done = launched.finish()
    assert (done.code, done.attempts) == (0, 1), done.text
