"""What a real run records of its steps: parts that sum, MFU that falls when the data is slow."""

from pathlib import Path
from statistics import median
from typing import Any

import jax
import pytest

from jaxrel.events import (
    CheckpointSaved,
    Evaluated,
    Finished,
    MeterStarted,
    StepCompleted,
    StepSampled,
)
from jaxrel.ledger.reader import read
from scripts.campaigns.workers import Worker
from tests.train.test_run import Command, train  # noqa: F401  (a fixture)

PEAK = {"throughput.peak_flops": 1e12, "mesh.cpu_devices": 8}
"""Of one device: above anything that this step can reach."""


def events(run: Path, kind: Any) -> list[Any]:
    return [record.event for record in read(run).records if isinstance(record.event, kind)]


def test_the_parts_of_every_step_sum_to_it_and_mfu_follows_from_them(
    tmp_path: Path,
    train: Command,  # noqa: F811
) -> None:
    run = tmp_path / "run"
    flags = {"run.dir": run, "throughput.peak_flops": 1e12, "evaluation.every": 4}
    code, lines = train(**flags)
    assert code == 0, lines
    steps, (meter,) = events(run, StepCompleted), events(run, MeterStarted)
    assert [step.step for step in steps] == list(range(1, 17))
    for step in steps:
        parts = step.data_s + step.dispatch_s + step.compute_s + step.communication_s + step.other_s
        assert parts == pytest.approx(step.step_s, abs=5e-6)
        assert step.step_s > 0 and 0 < step.mfu <= step.hfu <= 1
    assert meter.peak_flops == 1e12
    for at in range(5, 16):
        window = [step.step_s for step in steps[at - 4 : at + 1]]
        expected = meter.model_flops * 5 / (sum(window) * 8 * 1e12)
        assert steps[at].mfu == pytest.approx(expected, rel=1e-3)
        assert steps[at].hfu / steps[at].mfu == pytest.approx(
            meter.hardware_flops / meter.model_flops
        )
    assert events(run, Evaluated) and events(run, CheckpointSaved)
    assert any("MFU" in line for line in lines)
    for words in ("given by the user", "causal mask", "embeddings", "8 devices"):
        assert words in meter.definition


def test_no_mfu_is_shown_on_a_device_that_the_table_does_not_know(
    undisturbed: dict[str, Any],
) -> None:
    """After karpathy/nanoGPT 464."""
    steps = events(undisturbed["run"], StepCompleted)
    assert all(step.mfu is None and step.hfu is None and step.step_s > 0 for step in steps)
    assert events(undisturbed["run"], MeterStarted) == []


@pytest.mark.parametrize("broken", ["cost_analysis", "as_text"])
def test_a_program_that_cannot_be_analysed_is_trained_all_the_same(
    tmp_path: Path,
    train: Command,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    """After jax-ml/jax 20184; MFU is of our own count, and HFU unknown without the program."""

    def raises(*_: Any) -> Any:
        raise NotImplementedError("not on this backend")

    monkeypatch.setattr(jax.stages.Compiled, broken, raises)
    code, lines = train(**{"run.dir": tmp_path / "run", "throughput.peak_flops": 1e12})
    assert code == 0, lines
    steps, (meter,) = (
        events(tmp_path / "run", StepCompleted),
        events(tmp_path / "run", MeterStarted),
    )
    assert all(0 < step.mfu <= 1 for step in steps)
    assert (meter.hardware_flops is None) == (broken == "as_text")
    assert all((step.hfu is None) == (broken == "as_text") for step in steps)


@pytest.mark.slow
def test_slow_data_lowers_mfu_and_shows_as_data_and_a_sample_changes_no_bit(
    tmp_path: Path, compiled: Path, undisturbed: dict[str, Any]
) -> None:
    """After marin-community/marin 4429: it falls, never rises."""
    pipeline = {"data.pipeline": "tests.train.stuck:batches", "data.prefetch": 1}
    found = {}
    for slow in ("0", "0.3"):
        run = tmp_path / slow
        flags = {**PEAK, **pipeline, "throughput.sample_every": 8}
        worker = Worker(run, flags, cache=compiled, environment={"SLOW_S": slow})
        assert worker.finish() == 0, worker.lines
        found[slow] = events(run, StepCompleted)[4:]
        assert events(run, Finished)[0].state_digest == undisturbed["final_digest"]
        sample = next(e for e in events(run, StepSampled) if e.step == 8)
        total = (
            sample.compute_s + sample.exposed_communication_s + sample.callback_s
            + sample.other_s + sample.idle_s
        )  # fmt: skip
        assert total == pytest.approx(sample.step_s, abs=1e-6)
        assert sample.exposed_communication_s > 0
        after = [e for e in events(run, StepCompleted) if e.step > 8 and e.compute_s > 0]
        assert all(e.communication_s > 0 for e in after)
    data = {slow: median(e.data_s for e in steps) for slow, steps in found.items()}
    assert data["0.3"] > 0.1 > data["0"]
    assert median(e.mfu for e in found["0.3"]) < median(e.mfu for e in found["0"])


@pytest.mark.slow
def test_tokens_are_counted_once_over_a_restart(tmp_path: Path, compiled: Path) -> None:
    """After marin-community/marin 6482."""
    run = tmp_path / "run"
    first = Worker(run, PEAK, cache=compiled)
    first.wait_for(r"^step 11/")
    first.kill()
    second = Worker(run, PEAK, cache=compiled)
    assert second.finish() == 0
    (finished,) = events(run, Finished)
    resumed = int(next(line for line in second.lines if "resumed" in line).split()[-1])
    assert finished.tokens == 16 * 8 * 32
    assert finished.attempt_tokens == (16 - resumed) * 8 * 32
