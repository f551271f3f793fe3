"""A job that had nothing to do leaves nothing; one that did, or that says nothing, is on record."""

from pathlib import Path

import pytest

from jaxrel.events import AttemptEnded, AttemptStarted, FailureDetected, JobEnded, JobStarted
from jaxrel.ledger.reader import read
from jaxrel.supervise.provisional import Provisional
from jaxrel.supervise.workers import log_path

STARTED = JobStarted(["x"], ["host0"], 1)
FAILURE = FailureDetected("signal", 0, "host0", "killed", 0.1)


def job(run: Path, *phases: str, exit: int = 0) -> list[str]:
    """The events on record of a job whose worker was at these phases."""
    ledger = Provisional(run, 1, 1)
    ledger.write(STARTED)
    ledger.write(AttemptStarted(["host0"], "127.0.0.1:1"))
    log_path(run, 1, 0).parent.mkdir(parents=True)
    log_path(run, 1, 0).write_text("said something")
    for phase in phases:
        ledger.heard(phase)
    ledger.write(AttemptEnded(exit))
    ledger.write(JobEnded(exit))
    ledger.sync()
    ledger.close()
    return [type(record.event).__name__ for record in read(run).records] if any(
        run.iterdir()
    ) else []  # fmt: skip


WHOLE = ["JobStarted", "AttemptStarted", "AttemptEnded", "JobEnded"]


@pytest.mark.core
def test_nothing_to_do_leaves_nothing(tmp_path: Path) -> None:
    assert job(tmp_path, "start", "join", "done") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("phases", "exit"),
    [(("start", "restore", "data", "done"), 0), ((), 0), (("start", "join"), 65)],
)
def test_what_did_something_or_says_nothing_is_on_record(
    tmp_path: Path, phases: tuple[str, ...], exit: int
) -> None:
    assert job(tmp_path, *phases, exit=exit) == WHOLE
    assert log_path(tmp_path, 1, 0).read_text() == "said something"


def test_what_was_held_back_keeps_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("jaxrel.supervise.provisional.time.monotonic", lambda: now)
    ledger = Provisional(tmp_path, 1, 1)
    ledger.write(STARTED)
    now += 7.0
    ledger.write(FAILURE)
    ledger.close()
    first, second = read(tmp_path).records
    assert (type(first.event), type(second.event)) == (JobStarted, FailureDetected)
    assert 6.9e6 < second.time_us - first.time_us < 8e6
