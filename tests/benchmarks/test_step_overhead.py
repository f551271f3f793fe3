"""The benchmark compares like with like, counts what runs, and does not claim what it cannot."""

import numpy as np
import pytest

from benchmarks.hlo import count
from benchmarks.step_overhead import QUICK, Arm, judge, make_arms
from benchmarks.verdict import Ratio, paired_ratio, verdict

HLO = """\
HloModule toy

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%inner (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8] get-tuple-element(%p), index=1
  %all = f32[4,8] all-reduce(%x), replica_groups={}, to_apply=%sum
  ROOT %out = (s32[], f32[4,8]) tuple(%i, %all)
}

%outer (q: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %q = (s32[], f32[4,8]) parameter(0)
  ROOT %in = (s32[], f32[4,8]) while(%q), condition=%c, body=%inner, \
backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (z: (s32[], f32[4,8]), w: f32[8,2]) -> f32[4,2] {
  %z = (s32[], f32[4,8]) parameter(0)
  %w = f32[8,2] parameter(1)
  %loop = (s32[], f32[4,8]) while(%z), condition=%c, body=%outer, \
backend_config={"known_trip_count":{"n":"5"}}
  %y = f32[4,8] get-tuple-element(%loop), index=1
  ROOT %dot = f32[4,2] dot(%y, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_bodies_of_loops_count_as_often_as_they_run() -> None:
    counts = count(HLO)
    assert counts.collectives == {"all-reduce": 15}
    assert counts.collective_bytes == {"all-reduce": 15 * 4 * 8 * 4}
    assert counts.kernels == 15 + 1
    assert counts.dot_flops == 2 * 4 * 2 * 8


def test_a_loop_without_a_trip_count_is_not_guessed() -> None:
    with pytest.raises(ValueError, match="loop in: .* no trip count"):
        count(HLO.replace('"n":"3"', '"m":"3"'))


def test_bare_and_fast_are_the_same_mathematics() -> None:
    arms, structure = make_arms(QUICK, 2, 2, ["fast"], quiet=True)
    losses = {name: [arm.run() for _ in range(3)] for name, arm in arms.items()}
    np.testing.assert_allclose(losses["bare"], losses["fast"], rtol=1e-5)
    assert losses["bare"][0] != losses["bare"][2]  # it learns, so the third loss has updates in it
    assert structure["bare"]["dot_flops"] == pytest.approx(structure["fast"]["dot_flops"], rel=0.02)


EXACT = Ratio(1.0, 0.995, 1.005)


@pytest.mark.parametrize(
    "ratio, control, expected",
    [
        (Ratio(1.02, 1.01, 1.03), EXACT, "met"),
        (Ratio(1.20, 1.15, 1.25), EXACT, "not met"),
        (Ratio(1.04, 1.02, 1.06), EXACT, "undecided"),  # the bar lies within the interval
        (Ratio(1.02, 1.01, 1.03), Ratio(1.0, 0.97, 1.03), "undecided"),  # A/A is too wide
        (Ratio(1.20, 1.15, 1.25), Ratio(1.06, 1.055, 1.065), "undecided"),  # A/A is biased
    ],
)
def test_a_verdict_needs_a_control_narrower_than_the_margin(
    ratio: Ratio, control: Ratio, expected: str
) -> None:
    assert verdict(ratio, control, 1.05) == expected


def test_ratios_are_of_runs_of_the_same_round() -> None:
    load = np.random.default_rng(1).uniform(1, 10, 50)  # a shared machine slows whole rounds
    found = paired_ratio(list(1.5 * load), list(load))
    assert (found.low, found.median, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_every_bar_is_judged_on_both_clocks_against_its_own_base() -> None:
    seconds = {"bare": 1.0, "bare again": 1.0, "fast": 1.02, "invariant": 1.3}
    result = judge(
        {name: Arm(None, None, None, [s] * 9, [2 * s] * 9) for name, s in seconds.items()}
    )
    for clock in ("wall", "cpu"):
        fast, invariant = result[clock]["bars"]
        assert (fast["against"], fast["verdict"]) == ("bare", "met")
        assert (invariant["against"], invariant["verdict"]) == ("fast", "not met")
        assert invariant["ratio"]["median"] == pytest.approx(1.3 / 1.02)
