"""SIGTERM, from start-up to the wait for data, to one process and to two."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrel.checkpoint.listing import newest
from jaxrel.exit_codes import ExitCode
from jaxrel.train.stop import StopSignal
from scripts.campaigns.workers import Worker, final_digest, free_port
from tests.train import stuck


def until(holds: Callable[[], Any], timeout_s: float = 60.0) -> None:
    ends = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.005)


def saved_step(worker: Worker, run: Path) -> int:
    """The step that a stopped worker says it saved, which is then on disk; 0 for none."""
    assert worker.finish() == ExitCode.PREEMPTED, worker.lines
    found = re.fullmatch(
        r"jaxrel: asked to stop: (?:step (\d+) is saved|no step was complete);"
        r" start again to go on",
        worker.lines[-1],
    )
    assert found, worker.lines
    step = int(found[1] or 0)
    assert step == (newest(run / "checkpoints") or 0)
    return step


@pytest.mark.core
@pytest.mark.slow
def test_a_run_stopped_in_start_up_and_in_a_step_ends_in_the_same_bits(
    tmp_path: Path, compiled: Path, undisturbed: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    early = Worker(run, {"mesh.cpu_devices": 8}, cache=compiled)
    until((run / "config.yaml").exists)  # all checks are made, nothing is compiled yet
    early.process.terminate()
    assert saved_step(early, run) <= 1

    in_a_step = Worker(run, {"mesh.cpu_devices": 4}, cache=compiled)
    shown = in_a_step.wait_for(r"^step (6|7)/")
    in_a_step.process.terminate()
    saved = saved_step(in_a_step, run)
    assert saved >= int(shown.split()[1].split("/")[0])
    assert in_a_step.lines[-2].startswith(f"step {saved}/")  # the last completed one

    last = Worker(run, {"mesh.cpu_devices": 8}, cache=compiled)
    assert last.finish() == 0
    assert f"resumed from step {saved}" in last.lines[0]
    assert final_digest(last.lines) == undisturbed["final_digest"]


@pytest.mark.slow
def test_a_wait_for_data_is_cut_short(
    tmp_path: Path, compiled: Path, undisturbed: dict[str, Any]
) -> None:
    """The batch would come in ten minutes; the steps before it are saved now."""
    run, gate = tmp_path / "run", tmp_path / "gate"
    flags = {"data.pipeline": "tests.train.stuck:batches", "mesh.cpu_devices": 8}
    environment = {"STUCK_UNTIL": str(gate)}
    waiting = Worker(run, flags, cache=compiled, environment=environment)
    waiting.wait_for(rf"^step {stuck.POSITION - 1}/")  # the next one is under way, not shown
    waiting.process.terminate()
    assert saved_step(waiting, run) == stuck.POSITION

    gate.touch()
    last = Worker(run, flags, cache=compiled, environment=environment)
    assert last.finish() == 0
    assert final_digest(last.lines) == undisturbed["final_digest"]


@pytest.mark.slow
def test_two_processes_stop_at_the_same_step(
    tmp_path: Path, compiled: Path, undisturbed: dict[str, Any]
) -> None:
    """Asked one of them, then both; what is left is done by one process on 8 devices."""
    run, saved = tmp_path / "run", 0
    flags = {"data.pipeline": "tests.train.stuck:batches"}
    slow = {"SLOW_S": "0.5"}  # JAX's agreement takes time, not steps: the run is not to end first
    for asked in ((1,), (0, 1)):
        coordinator = f"127.0.0.1:{free_port()}"
        job = {"mesh.cpu_devices": 4, "job.coordinator": coordinator, "job.num_processes": 2}
        workers = [
            Worker(run, {**flags, **job, "job.process_id": i}, cache=compiled, environment=slow)
            for i in range(2)
        ]
        workers[0].wait_for(rf"^step {saved + 2}/")
        for process in asked:
            workers[process].process.terminate()
        first, second = (saved_step(worker, run) for worker in workers)
        assert first == second >= saved + 2
        saved = first

    alone = Worker(run, {**flags, "mesh.cpu_devices": 8}, cache=compiled)
    assert alone.finish() == 0
    assert f"resumed from step {saved}" in alone.lines[0]
    assert final_digest(alone.lines) == undisturbed["final_digest"]


def test_the_signal_is_heard_inside_the_block_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert not stop.asked(0)
        with stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.asked(1)
        os.kill(os.getpid(), signal.SIGTERM)  # still heard: this process lives
        assert stop.asked(2)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_wait_ends_when_asked() -> None:
    forever = threading.Event()
    with StopSignal() as stop:
        assert stop.unless_asked(lambda: 7) == 7
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert stop.unless_asked(lambda: forever.wait(60)) is None
        assert stop.asked(1)


def test_a_thread_changes_no_signal_handler() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def use() -> None:
        with StopSignal() as stop:
            seen.append((stop.asked(0), signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [(False, True)]


def test_a_job_without_the_preemption_service_is_never_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jaxrel.train.stop.jax_is_alone", lambda: False)
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with StopSignal() as stop:
            assert stop.asked(3) is False
    finally:
        jax.config.update("jax_enable_preemption_service", True)


def test_a_signal_that_another_thread_receives_ends_the_wait_too() -> None:
    """The kernel may give a signal to any thread; the main one then sleeps on."""
    forever, other = threading.Event(), threading.Thread(target=time.sleep, args=(3,))
    other.start()
    with StopSignal() as stop:
        assert other.ident
        threading.Timer(0.2, signal.pthread_kill, (other.ident, signal.SIGTERM)).start()
        began = time.monotonic()
        assert stop.unless_asked(lambda: forever.wait(60)) is None
        assert time.monotonic() - began < 30
    other.join()


def test_the_errors_of_a_wait_are_its_own() -> None:
    def late() -> None:
        raise TimeoutError("of the storage")

    with StopSignal() as stop:
        with pytest.raises(TimeoutError, match="of the storage"):
            stop.unless_asked(late)
        with pytest.raises(StopIteration):
            stop.unless_asked(iter(()).__next__)
