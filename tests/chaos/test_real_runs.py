"""Faults in real runs: how the process ends, and what it leaves to go on from."""

import re
from pathlib import Path

import pytest

from jaxrel.chaos.faults import EXIT
from jaxrel.checkpoint.listing import newest
from jaxrel.events import StepCompleted, WorkerFailed
from jaxrel.exit_codes import ExitCode
from jaxrel.ledger.reader import read
from scripts.campaigns.workers import Worker

STEP = 7
"""Where each fault comes; steps 2, 4 and 6 are to be saved."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "recorded", "at_least"),
    [
        # An exception waits for the save of step 6. Nothing else does, but that save itself has
        # waited for the one before. What cannot be written is not recorded either.
        ("raise_at_step", ExitCode.FAILED, "InjectedError: raised on purpose", 6),
        ("exit_at_step", EXIT, "", 4),
        ("fail_writes_at_step", ExitCode.FAILED, "", 4),
    ],
)
def test_a_fault_ends_the_run_and_leaves_a_good_checkpoint(
    tmp_path: Path, compiled: Path, fault: str, code: int, recorded: str, at_least: int
) -> None:
    run = tmp_path / "run"
    flags = {"checkpoint.interval": 2, "mesh.cpu_devices": 2, f"chaos.{fault}": STEP}
    worker = Worker(run, flags, cache=compiled)
    assert worker.finish() == code, worker.lines
    if fault == "fail_writes_at_step":
        assert re.match(r"jaxrel: the save of step [68] failed", worker.lines[-1])
    events = [record.event for record in read(run).records]
    steps = [event.step for event in events if isinstance(event, StepCompleted)]
    assert steps == list(range(1, STEP)), "every update before it, and none after it"
    failed = [event.error for event in events if isinstance(event, WorkerFailed)]
    assert [error[: len(recorded)] for error in failed] == ([recorded] if recorded else [])
    assert at_least <= (newest(run / "checkpoints") or 0) <= 6
