"""What a process says of itself reaches its agent and the ledger, and nothing else stops it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrel import heartbeat
from jaxrel.events import (
    Finished,
    PhaseBegan,
    RecordsLost,
    Resumed,
    StepCompleted,
    WorkerFailed,
    WorkerStarted,
)
from jaxrel.exit_codes import PreemptedError
from jaxrel.ledger.reader import read
from jaxrel.throughput.meter import Throughput
from jaxrel.throughput.timer import StepParts
from jaxrel.train.recorder import Recorder, digest_of


@pytest.fixture
def beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "beat"
    heartbeat.create(path)
    monkeypatch.setenv(heartbeat.ENVIRONMENT, str(path))
    return path


def events(run: Path) -> list[Any]:
    return [record.event for record in read(run).records]


def said(path: Path) -> tuple[str, int, int]:
    found = heartbeat.read(path)
    assert found
    return found.phase, found.completed, found.dispatched


@pytest.mark.core
def timed(data_s: float) -> Throughput:
    parts = StepParts(data_s + 2.0, data_s, 0.5, 1.0, 0.25, 0.0, 0.25)
    return Throughput(parts, None, 0.5, None, None)


def test_a_life(tmp_path: Path, beat: Path) -> None:
    run = tmp_path / "run"
    with Recorder() as recorder:
        recorder.phase("start")
        recorder.phase("join")
        assert not run.exists()  # nothing is written before it begins
        recorder.begin(run, 0, 1, attempt=3)
        recorder.resumed(0, {"data": 4, "fsdp": 2}, None)
        recorder.phase("train", 0)
        recorder.at("data", 0, 0)
        recorder.at("wait", 0, 1)
        assert said(beat) == ("wait", 0, 1)
        groups = {"loss": np.array([1.0, np.nan])}
        recorder.step(1, 2.5, 1.5, groups=groups, throughput=timed(1.25))
        recorder.step(2, float("nan"), 1.5)
        recorder.finished(2, "ab")
        recorder.done()
    assert said(beat)[0] == "done"
    found = events(run)
    assert [type(event) for event in found] == [
        WorkerStarted, PhaseBegan, PhaseBegan, Resumed, PhaseBegan, StepCompleted, StepCompleted,
        Finished,
    ]  # fmt: skip
    assert [e.phase for e in found if isinstance(e, PhaseBegan)] == ["start", "join", "train"]
    assert found[3] == Resumed(0, 8, 1, {"data": 4, "fsdp": 2}, None)
    assert found[5].groups == {"loss": [1.0, None]}
    assert (found[5].data_s, found[6].data_s) == (1.25, 0.0)
    assert (found[5].step_s, found[5].mfu, found[6].step_s) == (3.25, 0.5, None)
    assert (found[5].loss, found[6].loss) == (2.5, None)
    assert {record.attempt for record in read(run).records} == {3}


def test_what_came_before_it_began_keeps_its_time(tmp_path: Path) -> None:
    with Recorder() as recorder:
        recorder.phase("start")
        recorder._early = [(at - 5.0, event) for at, event in recorder._early]
        recorder.begin(tmp_path, attempt=1)
        recorder.phase("train")
    times = [record.time_us for record in read(tmp_path).records]
    assert times[1] - times[0] < 1_000_000  # a process is there from its first phase on
    assert times[2] - times[1] >= 5_000_000


def test_only_process_0_speaks_of_steps(tmp_path: Path) -> None:
    for process in (0, 1):
        with Recorder() as recorder:
            recorder.begin(tmp_path, process, 2, attempt=1)
            recorder.step(1, 2.0)
            recorder.evaluated(1, 2.0, 8, 0.1)
            recorder.saved(1, 1.0, 0.1, "ab")
    kinds = [(r.source, type(r.event).__name__) for r in read(tmp_path).records]
    assert [kind for kind in kinds if kind[0] == "rank1"] == [("rank1", "WorkerStarted")]
    assert len(kinds) == 5


@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyError("weights"), "KeyError: 'weights'"), (PreemptedError("asked to stop"), None)],
)
def test_an_error_is_told_and_goes_on(tmp_path: Path, beat: Path, error: Any, told: Any) -> None:
    with pytest.raises(type(error)), Recorder() as recorder:
        recorder.begin(tmp_path / "run", attempt=1)
        raise error
    failed = [e for e in events(tmp_path / "run") if isinstance(e, WorkerFailed)]
    assert [(e.error, e.exit) for e in failed] == [
        ("KeyError: 'weights'", 70) if told else ("PreemptedError: asked to stop", 75)
    ]
    found = heartbeat.read(beat)
    assert found
    assert found.error == (told or "")


def test_a_sink_that_lost_something_is_on_record(tmp_path: Path) -> None:
    class Sink:
        lost, error, seen = 2, "disk full", 0

        def write(self, event: Any) -> None:
            self.seen += 1

        def flush(self) -> None: ...

        def close(self) -> None: ...

    sink = Sink()
    with Recorder() as recorder:
        recorder.begin(tmp_path, attempt=1, sinks=[sink])
        recorder.step(1, 2.0)
    assert sink.seen == 2
    assert events(tmp_path)[-1] == RecordsLost("Sink", 2, "disk full")


def test_many_groups_are_told_by_quantiles_and_the_largest() -> None:
    values = np.arange(100.0)
    values[7] = np.nan
    told = digest_of(values, step=5)
    assert told["groups"] == [7, 99, 98, 97, 96, 95, 94, 93]
    np.testing.assert_allclose(told["quantiles"], np.nanquantile(values, [0, 0.25, 0.5, 0.75, 1]))
    assert told["largest"][1:] == [99.0, 98.0, 97.0, 96.0, 95.0, 94.0, 93.0]
    assert len(digest_of(values, step=100)) == 100
    assert digest_of([1.0, 2.0], step=5) == [1.0, 2.0]


BLOCKED = """
import sys, time
from jaxrel.heartbeat import Heartbeat
from jaxrel.train.recorder import dump_on_request

def stuck_here():
    time.sleep(60)

dump_on_request(sys.argv[1], Heartbeat.from_environment())
print("ready", flush=True)
stuck_here()
"""


def test_a_blocked_process_writes_its_stacks(tmp_path: Path, beat: Path) -> None:
    environment = os.environ | {"JAXREL_ATTEMPT": "2", "JAXREL_PROCESS_ID": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, str(tmp_path)], env=environment, stdout=subprocess.PIPE
    )
    with process, contextlib.ExitStack() as always:
        always.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        found = heartbeat.read(beat)
        assert found
        assert found.dumps
        path = tmp_path / "stacks" / "attempt-2-rank-1.txt"
        for _ in range(200):
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.05)
            if "stuck_here" in path.read_text():
                break
        assert "stuck_here" in path.read_text()
        assert process.poll() is None
