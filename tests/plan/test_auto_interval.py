"""The interval that a run takes by itself."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrel.plan.auto_interval import (
    PRIOR_S,
    UNMEASURED_STEPS,
    IntervalPlan,
    expected_mtbf,
    plan_interval,
)
from jaxrel.plan.interval import optimum

pytestmark = pytest.mark.core


def test_the_mean_failure_rate() -> None:
    assert expected_mtbf(0, 0) == PRIOR_S == 8 * 3600
    assert expected_mtbf(0, PRIOR_S) == 2 * PRIOR_S
    assert expected_mtbf(3, 3600) == 9 * 3600 / 4
    # Enough evidence outweighs the prior: Llama 3's 419 interruptions in 54 days.
    assert expected_mtbf(419, 54 * 86400) / 3600 == pytest.approx(3.0930787589498805, rel=0.01)


def test_theory_decides() -> None:
    plan = plan_interval(1.5, 0.02, 4.0, 2, 7200)
    mtbf = 10 * 3600 / 3
    assert plan == IntervalPlan(
        steps=round(optimum(mtbf, 0.02) / 1.5),
        decided_by="optimum",
        optimal_s=optimum(mtbf, 0.02),
        mtbf_s=mtbf,
        step_s=1.5,
        cost_s=0.02,
        write_s=4.0,
        failures=2,
        observed_s=7200,
    )
    assert (plan.prior_failures, plan.prior_s) == (1.0, PRIOR_S)


def test_saves_never_meet() -> None:
    plan = plan_interval(1.0, 0.02, 100.5, 0, 0)
    assert (plan.steps, plan.decided_by) == (101, "least")
    assert plan_interval(1.0, 200000.0, None, 0, 0).steps == 200000  # blocks longer than M
    # A step longer than the optimum.
    plan = plan_interval(1000.0, 0.02, 0.02, 0, 0)
    assert (plan.steps, plan.decided_by) == (1, "least")
    assert plan_interval(1.0, 0.0, 0.0, 0, 0).steps == 1  # a save that costs nothing


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf, -1.0])
def test_what_is_not_known(unknown: float | None) -> None:
    no_step, no_cost = plan_interval(unknown, 1, 1, 0, 0), plan_interval(1, unknown, 1, 0, 0)
    assert (no_step.steps, no_step.decided_by) == (UNMEASURED_STEPS, "unmeasured")
    assert (no_cost.steps, no_cost.decided_by) == (UNMEASURED_STEPS, "unmeasured")
    assert no_step.step_s is None and no_cost.cost_s is None and no_cost.optimal_s is None
    assert plan_interval(0.0, 1, 1, 0, 0, unmeasured_steps=7).steps == 7
    no_write = plan_interval(1, 0.5, unknown, 0, 0)
    assert no_write.write_s is None and no_write.steps == round(optimum(PRIOR_S, 0.5))
    assert plan_interval(1, 0.5, 1, 0, unknown or 0.0).mtbf_s == PRIOR_S
    assert plan_interval(1, 0.5, 1, -1, 0).failures == 0


@given(
    st.none() | st.floats(),
    st.none() | st.floats(),
    st.none() | st.floats(),
    st.integers(-5, 10**20),
    st.floats(),
)
def test_any_measurement_gives_an_interval_that_can_be_recorded(
    step: float | None, cost: float | None, write: float | None, failures: int, observed: float
) -> None:
    plan = plan_interval(step, cost, write, failures, observed)
    assert plan.steps >= 1
    assert IntervalPlan(**json.loads(json.dumps(dataclasses.asdict(plan), allow_nan=False))) == plan


@given(st.floats(0.01, 100), st.floats(0.001, 100), st.floats(0, 1000), st.integers(0, 50))
def test_the_whole_steps_next_to_the_optimum_that_saves_allow(
    step: float, cost: float, write: float, failures: int
) -> None:
    plan = plan_interval(step, cost, write, failures, 86400)
    seconds = plan.steps * step
    assert seconds >= max(write, cost) * (1 - 1e-12)
    assert plan.optimal_s is not None
    if plan.decided_by == "optimum":
        assert abs(seconds - plan.optimal_s) <= step * 0.5000001
    else:
        assert seconds > plan.optimal_s - step / 2
        assert plan.steps == 1 or seconds < max(write, cost) + step * 1.0000001


@given(st.floats(0.01, 10), st.floats(0.001, 10), st.integers(0, 20), st.floats(0, 1e6))
def test_more_failures_shorten_and_more_time_lengthens(
    step: float, cost: float, failures: int, observed: float
) -> None:
    steps = plan_interval(step, cost, 0, failures, observed).steps
    assert plan_interval(step, cost, 0, failures + 1, observed).steps <= steps
    assert plan_interval(step, cost, 0, failures, observed + 3600).steps >= steps
