"""TensorBoard's own reader finds one value a tag and step, whatever happened on the way."""

import logging
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxrel.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    PhaseBegan,
    Resumed,
    StepCompleted,
)
from jaxrel.report.tensorboard import TensorBoard

DIGEST = "ab" * 16


def step(n: int, loss: float | None = None, **fields: Any) -> StepCompleted:
    groups = {"loss": [1.0, 2.0, 3.0, None], "grad_norm": {"quantiles": [0.0], "largest": [1.0]}}
    loss = n / 10 if loss is None else loss
    return StepCompleted(n, loss, 2.0, n / 1000, 64, groups, **fields)


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def scalars(found: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 5)) for event in found.Scalars(tag)]


@pytest.mark.core
def test_one_value_a_tag_and_step_after_restarts(tmp_path: Path) -> None:
    for start, end in ((0, 7), (4, 9), (0, 3), (2, 10)):  # (0, 3): began anew
        board = TensorBoard(tmp_path)
        board.write(Resumed(start, 8, 1))
        for n in range(start + 1, end + 1):
            board.write(step(n, loss=start + n / 10))
            if n % 2 == 0:
                board.write(Evaluated(n, n / 2, 32, 0.1))
                board.flush()  # as before every save
                board.write(CheckpointSaved(n, 1.5, 0.25, DIGEST))
        board.flush()  # and no close: it was killed
        assert (board.lost, board.error) == (0, "")
    found = read(tmp_path)
    lineage = [(1, 0.1), (2, 0.2)] + [(n, 2 + n / 10) for n in range(3, 11)]
    assert scalars(found, "train/loss") == [(n, round(x, 5)) for n, x in lineage]
    assert scalars(found, "train/learning_rate") == [(n, n / 1000) for n in range(1, 11)]
    assert scalars(found, "train/grad_norm") == [(n, 2.0) for n in range(1, 11)]
    even = range(2, 11, 2)
    assert scalars(found, "held_out/loss") == [(n, n / 2) for n in even]
    assert scalars(found, "checkpoint/seconds") == [(n, 1.5) for n in even]
    assert scalars(found, "checkpoint/blocking_s") == [(n, 0.25) for n in even]
    assert scalars(found, "checkpoint/success") == [(n, 1.0) for n in even]
    histograms = found.Histograms("groups/loss")
    assert [event.step for event in histograms] == list(range(1, 11))
    assert histograms[0].histogram_value.num == 3
    assert histograms[0].histogram_value.max == 3.0
    assert found.Tags()["histograms"] == ["groups/loss"]  # quantiles are no histogram


def test_rates_leave_out_what_held_the_loop_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("jaxrel.report.tensorboard.time.monotonic", lambda: now)
    board = TensorBoard(tmp_path)
    board.write(Resumed(0, 8, 1))
    board.write(step(1))
    now += 4.0
    board.write(step(2, data_s=1.5))
    board.write(PhaseBegan("checkpoint"))
    now += 30.0
    board.write(PhaseBegan("train"))
    now += 2.0
    board.write(step(3))
    board.close()
    found = read(tmp_path)
    assert scalars(found, "throughput/step_s") == [(2, 2.5), (3, 2.0)]  # not known of the first
    assert scalars(found, "throughput/tokens_per_second") == [(2, 16.0), (3, 32.0)]


def test_a_failed_save_shows(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.write(Resumed(0, 8, 1))
    board.write(CheckpointFailed(20, "disk full"))
    board.close()
    assert scalars(read(tmp_path), "checkpoint/success") == [(20, 0.0)]


def test_a_failure_to_write_is_counted_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "board").write_text("a file is in its place")
    board = TensorBoard(tmp_path / "board")
    with caplog.at_level(logging.WARNING):
        board.write(Resumed(0, 8, 1))
        for n in range(3):
            board.write(step(n + 1))
        board.flush()
        board.close()
    assert board.lost == 4
    assert "training goes on" in caplog.text
    assert len(caplog.records) == 1
