"""The held-out loss is on record exactly once a step, whatever was killed when."""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxrel.events import Evaluated, FailureDetected, Resumed
from jaxrel.ledger.reader import read
from jaxrel.supervise.workers import log_path
from tests.supervise import faulty, jobs
from tests.supervise.conftest import TWO_BY_FOUR
from tests.supervise.faulty import Fault
from tests.supervise.jobs import Launched, processes_of
from tests.supervise.test_jax_faults import report

DEADLINE_S = 600.0
ROUND_S = 0.5
"""About what an evaluation and the save after it take: in it a moment is drawn."""

# Evaluated, and killed before it was saved: the step is done again, and evaluated again.
FIRST = Fault("killed", 1, rank=0, step=4, at="save")
LAST = Fault("killed", 4, rank=1, step=16, at="save")


@dataclass(frozen=True)
class Kill:
    """SIGKILL to a rank, a moment after a step is shown, which is then about to be evaluated."""

    rank: int
    step: int
    after_s: float


def draw(seed: int) -> list[Kill]:
    """One in each of the attempts between `FIRST` and `LAST`."""
    rng = random.Random(seed)
    steps = sorted(rng.sample((6, 8, 10), LAST.attempt - FIRST.attempt - 1))
    return [Kill(rng.randrange(2), step, rng.random() * ROUND_S) for step in steps]


@pytest.mark.slow
def test_every_evaluation_is_on_record_once(
    tmp_path: Path, compiled: Path, undisturbed: jobs.Finished
) -> None:
    run, kills = tmp_path / "run", draw(seed=3)
    flags = (*TWO_BY_FOUR, "--max-no-progress", "9")
    with Launched(run, faulty.train(run, compiled, FIRST, LAST), *flags) as launched:
        for attempt, kill in enumerate(kills, FIRST.attempt + 1):
            wait_for_step(launched, attempt, kill.step)
            time.sleep(kill.after_s)
            os.kill(worker(run, attempt, kill.rank), signal.SIGKILL)
        done = launched.finish(DEADLINE_S)
    assert done.code == 0, done.text
    failures = done.of(FailureDetected)
    ranks = [kill.rank for kill in (FIRST, *kills, LAST)]
    assert [(f.kind, f.rank) for f in failures] == [("signal", rank) for rank in ranks]

    # Some were evaluated more than once, and the report, and TensorBoard, show each once.
    records = [r for r in read(run).records if r.source == "rank0"]
    evaluated = [r.event.step for r in records if isinstance(r.event, Evaluated)]
    assert evaluated.count(FIRST.step) > 1
    assert evaluated.count(LAST.step) > 1
    resumed = [r.event.step for r in records if isinstance(r.event, Resumed)]
    assert resumed[:2] == [0, 0]
    assert len(resumed) == LAST.attempt + 1
    every = list(range(2, 17, 2))
    assert [step for step, *_ in evaluations(run)] == every
    assert evaluations(run) == evaluations(undisturbed.run)
    own, other = scalars(run), scalars(undisturbed.run)
    assert [step for step, _ in own["held_out/loss"]] == every
    assert [step for step, _ in own["train/loss"]] == list(range(1, 17))
    assert own == other
    assert report(run)["final_state_digest"] == report(undisturbed.run)["final_state_digest"]


def test_what_is_killed_when_is_drawn_from_the_seed() -> None:
    assert draw(3) == draw(3) != draw(4)


def wait_for_step(launched: Launched, attempt: int, step: int) -> None:
    """Until an attempt has shown a step."""
    log, ends = log_path(launched.run, attempt, 0), time.monotonic() + DEADLINE_S
    while not (log.exists() and f"\nstep {step}/" in log.read_text()):
        assert time.monotonic() < ends, launched.text
        assert launched.process.poll() is None, launched.text
        time.sleep(0.005)


def worker(run: Path, attempt: int, rank: int) -> int:
    """The process that is this rank."""
    marks = {f"JAXREL_ATTEMPT={attempt}".encode(), f"JAXREL_PROCESS_ID={rank}".encode()}
    for pid in processes_of(run):
        if marks <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
            return pid
    raise AssertionError(f"no rank {rank} in attempt {attempt}")


def evaluations(run: Path) -> list[tuple[int, float, int]]:
    """Step, held-out loss and rows of each, by the report."""
    return [(e["step"], e["loss"], e["rows"]) for e in report(run)["evaluations"]]


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader shows of the two losses."""
    found: Any = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    tags = ("train/loss", "held_out/loss")
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in tags}
