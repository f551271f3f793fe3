"""Real processes on simulated hosts that are lost, come back, or are no good."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from jaxrel.events import FailureDetected, HostAway, HostBack, HostDrained
from jaxrel.supervise.messages import Alive, Hello, Spawn, decode, encode
from jaxrel.supervise.workers import log_path
from tests.supervise.jobs import (
    ROOT,
    Launched,
    agent_of,
    attempt_ends,
    launch,
    placements,
    processes_of,
    worker,
)

TWO = ("--hosts", "2")
FOR_GOOD = ("--host-return", "600")


@pytest.mark.core
def test_a_spare_takes_the_place_of_a_host_that_is_lost_for_good(tmp_path: Path) -> None:
    plan = worker(steps=60, rank=-1, faults=["keeps_a_child"])
    with Launched(tmp_path / "run", plan, *TWO, "--spares", "1", *FOR_GOOD) as launched:
        launched.wait_for("step 5")
        os.kill(agent_of(launched.run, "host1"), signal.SIGKILL)
        done = launched.finish()
    assert done.code == 0, done.text
    assert placements(done) == [["host0", "host1"], ["host0", "host2"]]
    assert (done.failure.kind, done.failure.host) == ("host_lost", "host1")
    assert [event.host for event in done.of(HostAway)] == ["host1"]
    assert "host1 is lost: its agent closed the connection" in done.text


@pytest.mark.core
def test_without_a_spare_the_job_goes_on_with_fewer_hosts(tmp_path: Path) -> None:
    flags = (*TWO, *FOR_GOOD, "--shrink-after", "4")
    with Launched(tmp_path / "run", worker(steps=60), *flags) as launched:
        launched.wait_for("step 3")
        os.kill(agent_of(launched.run, "host0"), signal.SIGKILL)
        done = launched.finish()
    assert done.code == 0, done.text
    assert placements(done) == [["host0", "host1"], ["host1"]]
    assert "launch: waiting for host0; 4 s after its loss fewer must do" in done.text
    assert "attempt 2 on host1 (1 of 2 hosts); 1 process;" in done.text


@pytest.mark.core
def test_a_host_that_is_back_is_used_by_the_next_attempt(tmp_path: Path) -> None:
    flags = (*TWO, "--host-return", "12", "--shrink-after", "0")
    with Launched(tmp_path / "run", worker(steps=100_000), *flags) as launched:
        launched.wait_for("step 3")
        os.kill(agent_of(launched.run, "host1"), signal.SIGKILL)
        launched.wait_for("attempt 2 on host0 ")
        launched.wait_for("host1 is back")
        (alone,) = workers_of(launched.run)  # the smaller attempt was left alone
        os.kill(alone, signal.SIGKILL)
        launched.wait_for("attempt 3 on host0, host1;")
        comes_to_a_step(launched, 3)
        launched.process.send_signal(signal.SIGTERM)
        done = launched.finish()
    assert done.code == 75, done.text
    assert placements(done) == [["host0", "host1"], ["host0"], ["host0", "host1"]]
    assert [event.host for event in done.of(HostBack)] == ["host1"]


def test_an_attempt_makes_way_for_one_on_more_hosts(tmp_path: Path) -> None:
    flags = (*TWO, "--host-return", "12", "--shrink-after", "0", "--grow-after", "0.5")
    with Launched(tmp_path / "run", worker(steps=100_000), *flags) as launched:
        launched.wait_for("step 3")
        os.kill(agent_of(launched.run, "host1"), signal.SIGKILL)
        launched.wait_for("attempt 3 on host0, host1;", 60.0)
        comes_to_a_step(launched, 3)
        launched.process.send_signal(signal.SIGTERM)
        done = launched.finish()
    assert (done.code, attempt_ends(done)) == (75, [70, 75, 75]), done.text
    assert done.failure.kind == "host_lost"  # and nothing else
    assert "launch: every process saved and left, for more hosts; restart at once" in done.text


@pytest.mark.core
def test_a_host_with_a_hardware_verdict_is_never_used_again(tmp_path: Path) -> None:
    """Two are drained in turn; the job ends well on the third."""
    plan = worker(steps=12, rank=1, faults=["exits_76", "exits_76"])
    done = launch(tmp_path / "run", plan, *TWO, "--spares", "1")
    assert done.code == 0, done.text
    assert placements(done) == [["host0", "host1"], ["host0", "host2"], ["host0"]]
    assert attempt_ends(done) == [76, 76, 0]
    assert [(e.host, e.reason) for e in done.of(HostDrained)] == [
        ("host1", "rank 1 of attempt 1 left with exit code 76"),
        ("host2", "rank 1 of attempt 2 left with exit code 76"),
    ]
    assert [(f.kind, f.host) for f in done.of(FailureDetected)] == [
        ("hardware", "host1"), ("hardware", "host2"),
    ]  # fmt: skip
    assert "host1 is drained, this job does not use it again: rank 1" in done.text
    assert "waiting for" not in done.text  # a drained host cannot come back


def test_a_job_without_a_host_that_it_may_use_ends(tmp_path: Path) -> None:
    plan = worker(rank=1, faults=["exits_76"])
    done = launch(tmp_path / "run", plan, *TWO, "--min-hosts", "2")
    assert (done.code, done.attempts) == (76, 1), done.text
    assert done.reason.startswith("too few hosts are left, drained: host1; rank 1: hardware: left")
    assert "restart" not in done.text


@pytest.mark.core
def test_an_exception_that_repeats_itself_ends_the_job(tmp_path: Path) -> None:
    plan = worker(faults=["raises"] * 9, at=4, every=0)
    done = launch(tmp_path / "run", plan, "--max-no-progress", "9")
    assert (done.code, done.attempts) == (79, 2), done.text
    assert done.reason.startswith("the same exception at step 4 twice: not hardware; the last")


def comes_to_a_step(launched: Launched, attempt: int) -> None:
    log, ends = log_path(launched.run, attempt, 0), time.monotonic() + 30
    while not log.exists() or "step" not in log.read_text():
        assert time.monotonic() < ends, launched.text
        time.sleep(0.02)


def workers_of(run: Path) -> list[int]:
    found = []
    for pid in processes_of(run):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"tests.supervise.worker" in words and b"jaxrel.cli" not in words:
            found.append(pid)
    return found


@pytest.mark.core
def test_an_agent_that_does_not_hear_its_leader_ends_its_processes(tmp_path: Path) -> None:
    """The leader is alive, and silent: it may be on the other side of a network that is cut."""

    async def leader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert decode(await reader.readline()) == Hello("host0", "secret")
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        order = Spawn(1, [0], 1, "127.0.0.1:1", str(tmp_path), command, lease_s=2.0)
        for message in (Alive(), order, Alive()):
            writer.write(encode(message))
        await reader.read()
        writer.close()

    async def job() -> tuple[int | None, bytes]:
        server = await asyncio.start_server(leader, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "jaxrel.cli", "agent", "--host", "host0"),
            *("--leader", f"127.0.0.1:{port}"),
            cwd=ROOT,
            env=os.environ | {"JAXREL_TOKEN": "secret", "JAXREL_TEST_RUN": str(tmp_path)},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, error = await asyncio.wait_for(agent.communicate(), 30.0)
        finally:
            if agent.returncode is None:
                agent.kill()
            server.close()
        return agent.returncode, error

    code, error = asyncio.run(job())
    assert code == 70
    assert b"is gone or silent" in error
    assert (tmp_path / "logs" / "attempt-1-rank-0.log").exists()
    assert list(processes_of(tmp_path)) == []
