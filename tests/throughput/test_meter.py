"""The parts of a step, MFU from them, what adds up, and steps that become slower."""

import ast
import inspect
import logging
import math
import random
from collections.abc import Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrel.plan.peaks import Peak
from jaxrel.throughput import drift, timer
from jaxrel.throughput import meter as meter_module
from jaxrel.throughput.drift import Drift
from jaxrel.throughput.meter import UNKNOWN, StepFlops, ThroughputMeter
from jaxrel.throughput.step_flops import counted_beside
from jaxrel.throughput.timer import Part, StepTimer
from jaxrel.train import loop, sampling

PEAK = Peak(100.0, "of a test")
FLOPS = StepFlops(300.0, 400.0, "counted by hand")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def meter(clock: Clock, **how: Any) -> ThroughputMeter:
    known = {"tokens": 64, "devices": 2, "peak": PEAK, "flops": FLOPS} | how
    return ThroughputMeter(**known, timer=StepTimer(clock))


def pass_time(clock: Clock, timer: StepTimer, *parts: tuple[Any, float]) -> None:
    for part, seconds in parts:
        timer.turn_to(part)
        clock.now += seconds


def test_a_step_by_hand(clock: Clock) -> None:
    found = meter(clock)
    found.timer.turn_to("other")
    found.timer.completed()
    pass_time(
        clock, found.timer,
        ("data", 0.5), ("dispatch", 0.25), ("compute", 4.0), ("other", 0.25),
    )  # fmt: skip
    first = found.completed()
    assert first.parts.step_s == first.parts.wall_s == 5.0
    assert (first.parts.data_s, first.parts.dispatch_s) == (0.5, 0.25)
    assert (first.parts.compute_s, first.parts.other_s) == (4.0, 0.25)
    assert first.tokens_per_s == 64 / 5
    assert first.mfu == 300 / (5 * 2 * 100)
    assert first.hfu == 400 / (5 * 2 * 100)


def test_saves_evaluations_and_compilation_are_no_part_of_a_step_and_data_is(clock: Clock) -> None:
    """After marin-community/marin 4429."""
    found = meter(clock)
    pass_time(clock, found.timer, ("excluded", 60.0), ("other", 0.0))
    found.timer.completed()
    values = []
    for parts in (
        [("compute", 3.0)],
        [("checkpoint", 7.0), ("compute", 3.0)],
        [("excluded", 9.0), ("compute", 3.0)],
        [("data", 3.0), ("compute", 3.0)],
    ):
        pass_time(clock, found.timer, *parts)
        values.append(found.completed())
    assert [v.parts.step_s for v in values] == [3, 3, 3, 6]
    assert [v.parts.wall_s for v in values] == [3, 10, 3, 6]
    assert values[0].mfu == values[1].mfu == values[2].mfu == 0.5
    assert values[3].mfu == 300 * 4 / (15 * 2 * 100)


def test_rates_are_of_the_newest_five_steps(clock: Clock) -> None:
    """A step that was seen late, and the next in no time, are no feat of the machine."""
    found = meter(clock)
    found.timer.turn_to("compute")
    values = []
    for seconds in (2.0, 2.0, 3.9, 0.1, 2.0, 2.0, 4.0):
        clock.now += seconds
        values.append(found.completed())
    assert [v.parts.step_s for v in values][2:4] == pytest.approx([3.9, 0.1])
    assert values[3].mfu == pytest.approx(300 / (2 * 2 * 100))
    assert values[-1].tokens_per_s == pytest.approx(5 * 64 / 12)


def test_what_the_host_did_while_the_devices_worked_is_no_loss(clock: Clock) -> None:
    timer = StepTimer(clock)
    timer.turn_to("data")
    clock.now += 2
    timer.turn_to("dispatch", busy=True)  # the batch came while a step was under way
    clock.now += 1
    timer.turn_to("compute", busy=False)
    clock.now += 3
    parts = timer.completed()
    assert (parts.data_s, parts.dispatch_s, parts.compute_s) == (0, 1, 5)
    timer.turn_to("checkpoint")
    clock.now += 4
    timer.turn_to("other", busy=True)  # a save blocks the loop whoever is busy
    assert timer.completed().checkpoint_s == 4


def test_exposed_communication_is_the_sampled_share_of_the_devices_time(clock: Clock) -> None:
    timer = StepTimer(clock)
    timer.communication_share = 0.25
    timer.turn_to("compute")
    clock.now += 8
    parts = timer.completed()
    assert (parts.compute_s, parts.communication_s, parts.wall_s) == (6, 2, 8)


@given(
    st.lists(
        st.tuples(st.sampled_from(get_args(Part)), st.integers(0, 10**6), st.booleans()),
        max_size=30,
    ),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
def test_the_parts_sum_to_the_time_that_was_not_excluded(
    turns: list[tuple[Part, int, bool]], share: float
) -> None:
    clock = Clock()
    timer = StepTimer(clock)
    timer.turn_to("other")
    timer.completed()
    timer.communication_share = share
    wanted = 0.0
    for part, milliseconds, busy in turns:
        timer.turn_to(part, busy=busy)
        clock.now += milliseconds / 1024
        wanted += milliseconds / 1024 if part != "excluded" else 0
    parts = timer.completed()
    total = (
        parts.data_s + parts.dispatch_s + parts.compute_s + parts.communication_s
        + parts.checkpoint_s + parts.other_s
    )  # fmt: skip
    assert parts.wall_s == pytest.approx(wanted, abs=1e-9)
    assert total == pytest.approx(parts.wall_s, abs=1e-9)


def test_above_1_is_flagged_once_and_never_given(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """After jax-ml/jax 13956."""
    found = meter(clock, peak=Peak(1.0, "too low"))
    found.timer.turn_to("compute")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.now += 1
            value = found.completed()
            assert (value.mfu, value.hfu) == (None, None)
    told = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in told] == ["MFU", "HFU"]
    assert "above 1" in told[0] and "too low" in told[0] and "counted by hand" in told[0]


@pytest.mark.parametrize("flops", [None, math.nan, -1.0])
def test_unknown_flops_or_peak_give_no_number(clock: Clock, flops: float | None) -> None:
    found = meter(clock, flops=StepFlops(flops, None, ""))
    found.timer.turn_to("compute")
    clock.now += 1
    assert found.completed().mfu is None
    found = meter(clock, peak=Peak(None, "unknown"))
    found.timer.turn_to("compute")
    clock.now += 1
    value = found.completed()
    assert value.mfu is None and value.tokens_per_s == 64


def test_counters_are_exact_over_restarts(clock: Clock) -> None:
    """After marin-community/marin 6482."""
    first = meter(clock)
    for _ in range(20):
        first.completed()
    kept = first.state()
    for _ in range(7):  # lost with the process
        first.completed()
    second = meter(clock)
    second.restore(kept)
    for _ in range(20):
        second.completed()
    assert second.state() == {"steps": 40, "tokens": 40 * 64, "best_step_s": None, "devices": 2}
    assert second.attempt_steps == 20


def test_drift_is_measured_against_the_run_before_on_as_many_devices(clock: Clock) -> None:
    first = meter(clock)
    first.timer.turn_to("compute")
    for _ in range(60):
        clock.now += 1.0
        first.completed()
    assert first.state()["best_step_s"] == 1.0
    for devices, told in ((2, 1), (4, 0)):
        second = meter(clock, devices=devices)
        second.restore(first.state())
        second.timer.turn_to("compute")
        drifted = 0
        for _ in range(60):
            clock.now += 1.5
            drifted += second.completed().drifted is not None
        assert drifted == told


def test_the_definition_says_what_the_number_means(clock: Clock) -> None:
    assert meter(clock).definition == "counted by hand; 2 devices; peak: of a test"


class Compiled:
    """As far as it is looked at."""

    def __init__(self, text: Any) -> None:
        self._text = text

    def as_text(self) -> str:
        return self._text()


def test_flops_are_counted_while_a_program_compiles() -> None:
    w = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    step = jax.jit(lambda w: w.T @ w)
    counted = counted_beside(step, w)
    found = counted(step.lower(w).compile())
    assert found.model == found.hardware == 2 * 4 * 4 * 8
    assert "model FLOPs" in found.definition and "hardware FLOPs" in found.definition


def test_a_count_that_fails_leaves_flops_unknown_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> Any:
        raise NotImplementedError("no such operation")

    with caplog.at_level(logging.WARNING):
        assert counted_beside(fails)(Compiled(lambda: "")) is UNKNOWN
    assert "FLOPs of the step are unknown: NotImplementedError: no such" in caplog.text


def test_a_program_without_text_leaves_hardware_flops_unknown() -> None:
    def raises() -> str:
        raise RuntimeError("no text on this backend")

    found = counted_beside(lambda: jnp.ones((4, 4)) @ jnp.ones((4, 4)))(Compiled(raises))
    assert (found.model, found.hardware) == (128, None)
    assert "not counted: the program: no HLO text" in found.definition


def noisy(rng: random.Random, base: float, count: int) -> Iterator[float]:
    for _ in range(count):
        yield base * rng.uniform(0.9, 1.1) * (5 if rng.random() < 0.05 else 1)


@pytest.mark.parametrize("seed", range(10))
def test_drift_is_told_once_and_outliers_are_not_drift(seed: int) -> None:
    rng, drift = random.Random(seed), Drift()
    assert not any(drift.add(s) for s in noisy(rng, 1.0, 2000))
    told = [(i, d) for i, s in enumerate(noisy(rng, 1.3, 200)) if (d := drift.add(s))]
    ((at, found),) = told
    assert 5 <= at <= 25
    assert found.before_s == pytest.approx(1.0, rel=0.1)
    assert found.now_s == pytest.approx(1.3, rel=0.2)
    assert not any(drift.add(s) for s in noisy(rng, 1.0, 200))
    assert sum(drift.add(s) is not None for s in noisy(rng, 1.3, 200)) == 1


def test_drift_says_nothing_of_a_short_run() -> None:
    drift = Drift()
    assert not any(drift.add(float(s)) for s in range(1, 50))


@pytest.mark.parametrize("module", [timer, meter_module, drift])
def test_the_meter_knows_no_jax(module: Any) -> None:
    """So it adds no FLOP, no pass over an array and no wait for a device to any step."""
    names = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
        )
    }
    assert names <= {
        "collections",
        "dataclasses",
        "jaxrel",
        "logging",
        "math",
        "statistics",
        "time",
        "typing",
    }


def test_the_loop_waits_for_each_step_once() -> None:
    """`jax.device_get` and its kin stand where the loop waited before it had a meter."""
    source = inspect.getsource(loop)
    assert source.count("device_get(") == 1
    assert "block_until_ready" not in source
    assert "block_until_ready" not in inspect.getsource(sampling)
