"""What a pipeline loses."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrel.cli import main
from jaxrel.exit_codes import UsageError
from jaxrel.plan import bubble

pytestmark = pytest.mark.core


# p, m, v, then bubble over ideal (p-1)/(v m) and share of all time (SC21, arXiv 2104.04473, 2.2).
@pytest.mark.parametrize(
    ("stages", "microbatches", "interleave", "ratio", "fraction"),
    [
        (8, 24, 1, 0.2916666666666667, 0.22580645161290322),
        (8, 32, 1, 0.21875, 0.1794871794871795),
        (8, 64, 1, 0.109375, 0.09859154929577464),
        (16, 16, 1, 0.9375, 0.4838709677419355),
        (16, 32, 1, 0.46875, 0.3191489361702128),
        (4, 8, 2, 0.1875, 0.15789473684210525),
        (64, 512, 1, 0.123046875, 0.10956521739130434),
    ],
)
def test_published_bubbles(
    stages: int, microbatches: int, interleave: int, ratio: float, fraction: float
) -> None:
    made = bubble.document(stages, microbatches, interleave)
    assert made["bubble_over_ideal"] == pytest.approx(ratio, rel=1e-15)
    assert made["bubble_fraction"] == pytest.approx(fraction, rel=1e-15)
    assert "(p-1)/(v m)" in made["definition"] and "all time" in made["definition"]


@given(st.integers(1, 12), st.integers(1, 40))
def test_a_schedule_played_out(stages: int, microbatches: int) -> None:
    """All forward, then all backward, a unit of time each: the idle slots of a device, counted."""
    done = [[0] * microbatches for _ in range(stages)]
    for stage in range(stages):
        for batch in range(microbatches):
            before = done[stage - 1][batch] if stage else 0
            done[stage][batch] = max(before, done[stage][batch - 1] if batch else 0) + 1
    idle = 2 * (done[-1][-1] - microbatches)  # the backward pass is its mirror
    work = 2 * microbatches
    made = bubble.document(stages, microbatches)
    assert made["bubble_over_ideal"] == pytest.approx(idle / work)
    assert made["bubble_fraction"] == pytest.approx(idle / (idle + work))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0, 1, 1), "stages: got 0: expected at least 1"),
        ((1, 0, 1), "microbatches: got 0: expected at least 1"),
        ((1, 1, -1), "interleave: got -1: expected at least 1"),
    ],
)
def test_wrong_inputs(given: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        bubble.document(*given)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "bubble", "--stages", "4", "--microbatches", "8"]
    assert main([*argv, "--interleave", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == bubble.document(4, 8, 2)
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "bubble  37.50% of the time of the work"
    assert lines[1] == "        27.27% of all time"
    assert main([*argv, "--interleave", "0"]) == 64
    assert capsys.readouterr().err == "jaxrel: interleave: got 0: expected at least 1\n"
