"""From the peak to the step, with made-up measurements whose rows are worked out by hand."""

from dataclasses import replace
from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrel.plan import waterfall as w
from jaxrel.plan.waterfall import Measured, waterfall

pytestmark = pytest.mark.core

# In binary fractions, so that every row is exact.
STEP = Measured(
    step=128.0,
    synthetic=112.0,
    model=32.0,
    hardware=40.0,
    products=52.0,
    compute=64.0,
    communication=24.0,
    callbacks=8.0,
    idle=12.0,
)
ROWS = {
    w.MODEL: 32.0,
    w.RECOMPUTATION: 8.0,  # 40 - 32
    w.KERNELS: 12.0,  # 52 - 40
    w.COMPUTATION: 12.0,  # 64 - 52
    w.COMMUNICATION: 24.0,
    w.STRAGGLERS: 0.0,
    w.CALLBACKS: 8.0,
    w.IDLE: 12.0,
    w.DATA: 16.0,  # 128 - 112
    w.REST: 4.0,  # 112 - 64 - 24 - 8 - 12
}


def seconds(measured: Measured) -> dict[str, float]:
    return {row.name: row.seconds for row in waterfall(measured).rows}


def test_each_row_is_what_was_measured_and_all_sum_to_the_step() -> None:
    found = waterfall(STEP)
    assert seconds(STEP) == ROWS
    assert list(seconds(STEP)) == list(ROWS), "from the peak to the step"
    assert [row.share for row in found.rows] == [value / 128 for value in ROWS.values()]
    assert found.notes == ()
    assert found.loss == w.Row(w.COMMUNICATION, 24.0, 24 / 128), "the model's own is no loss"


@pytest.mark.parametrize(
    ("changed", "rows", "note"),
    [
        # The step with data was faster: no data row, and the step is the shorter one.
        (
            {"synthetic": 130.0, "compute": 60.0},
            {w.DATA: 0.0, w.COMPUTATION: 8.0, w.REST: 24.0},
            "the step with data was the faster one by 2e+03 ms: taken for noise",
        ),
        (
            {"hardware": 31.0, "products": 52.0},
            {w.RECOMPUTATION: 0.0, w.KERNELS: 20.0},
            "the program's products take less than the model's by 1e+03 ms: taken for noise",
        ),
        (
            {"products": 36.0},
            {w.KERNELS: 0.0, w.COMPUTATION: 24.0},
            "the products alone were faster than at peak by 4e+03 ms: taken for noise",
        ),
        # Products take longer alone than the trace sees the devices compute: what is left pays.
        (
            {"products": 68.0},
            {w.KERNELS: 28.0, w.COMPUTATION: 0.0, w.IDLE: 12.0, w.REST: 0.0},
            "the devices were seen to compute for less than the products take alone by 4e+03 ms:"
            " taken for noise",
        ),
    ],
)
def test_a_difference_below_zero_becomes_zero_and_is_told(
    changed: dict[str, float], rows: dict[str, float], note: str
) -> None:
    measured = replace(STEP, **changed)
    assert seconds(measured) == {**ROWS, **rows}
    assert waterfall(measured).notes == (note,)
    assert fsum(seconds(measured).values()) == 128


def test_more_than_the_step_is_cut_in_the_order_of_trust() -> None:
    much = replace(STEP, model=100.0, hardware=100.0, callbacks=8.0, products=110.0)
    found = seconds(much)
    assert (found[w.MODEL], found[w.CALLBACKS], found[w.KERNELS]) == (100.0, 8.0, 4.0)
    assert found[w.COMMUNICATION] == found[w.IDLE] == found[w.REST] == 0
    assert fsum(found.values()) == 128


def test_unknown_flops_leave_their_rows_out() -> None:
    unknown = replace(STEP, model=None, hardware=None, products=None)
    assert seconds(unknown) == {
        **{name: value for name, value in ROWS.items() if name not in (w.MODEL, w.KERNELS)},
        w.RECOMPUTATION: 0.0,
        w.COMPUTATION: 64.0,
    }
    assert seconds(replace(STEP, model=None))[w.MODEL] == 40, "of the program, where it is known"
    assert seconds(replace(STEP, hardware=None))[w.KERNELS] == 20


def test_a_straggler_is_a_wait_of_the_others() -> None:
    assert seconds(replace(STEP, straggler=30.0)) == {
        **ROWS, w.STRAGGLERS: 30.0, w.COMMUNICATION: 0.0, w.IDLE: 6.0,
    }  # fmt: skip
    # Where cores are shared the slow device computes while the others wait.
    assert seconds(replace(STEP, straggler=10.0, shared=True)) == {
        **ROWS, w.STRAGGLERS: 10.0, w.COMPUTATION: 2.0,
    }  # fmt: skip
    most = seconds(replace(STEP, straggler=1e9))
    assert most[w.STRAGGLERS] == 24 + 12 + 4, "no more than the waits that there are"
    assert most[w.COMPUTATION] == 12


def test_a_bubble_is_its_formula_out_of_the_waits() -> None:
    # 4 stages and 9 microbatches: 3/9 over the work, a quarter of all time, which is 112.
    found = waterfall(replace(STEP, bubble=0.25))
    assert {row.name: row.seconds for row in found.rows} == {
        **ROWS, w.BUBBLE: 28.0, w.IDLE: 0.0, w.COMMUNICATION: 8.0,
    }  # fmt: skip
    assert found.notes == ()
    assert w.BUBBLE not in ROWS
    large = waterfall(replace(STEP, bubble=0.75))
    assert {row.name: row.seconds for row in large.rows}[w.BUBBLE] == 12 + 24 + 12 + 8 + 4
    assert large.notes == (
        "a pipeline bubble of 8.4e+04 ms by formula, of which the step has room for 6e+04 ms",
    )


times = st.floats(0, 1e4)
measurements = st.builds(
    Measured,
    step=st.floats(1e-6, 1e4),
    synthetic=times,
    model=st.none() | times,
    hardware=st.none() | times,
    products=st.none() | times,
    compute=times,
    communication=times,
    callbacks=times,
    idle=times,
    straggler=times,
    shared=st.booleans(),
    bubble=st.none() | st.floats(0, 1),
)


@given(measurements)
def test_shares_sum_to_one_whatever_was_measured(measured: Measured) -> None:
    found = waterfall(measured)
    assert abs(fsum(row.share for row in found.rows) - 1) < 1e-9
    assert all(0 <= row.share <= 1 + 1e-9 for row in found.rows)
