"""When the loop saves."""

from itertools import pairwise
from typing import Any

import pytest

from jaxrel.checkpoint.flight import Landed
from jaxrel.events import IntervalPlanned
from jaxrel.plan.interval import optimum
from jaxrel.train.cadence import Cadence


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(cadence: Cadence, clock: Clock, steps: int, step_s: float, save: Landed) -> list[int]:
    """The steps that are saved; every save is complete before the next and blocks the loop."""
    saved, landed = [], None
    for done in range(1, steps + 1):
        clock.now += step_s
        cadence.completed()
        if cadence.due(done):
            saved.append(done)
            cadence.saved(done, landed)
            landed = save
            clock.now += save.blocking_s
    return saved


def auto(clock: Clock, told: list[Any], **history: Any) -> Cadence:
    return Cadence("auto", tell=told.append, clock=clock, **history)


def test_a_number_of_steps_is_counted_from_zero_whatever_was_resumed() -> None:
    cadence = Cadence(5, since=7)
    assert [done for done in range(8, 21) if cadence.due(done)] == [10, 15, 20]


def test_auto_learns_what_a_save_costs_and_follows_theory() -> None:
    clock, told = Clock(), []
    saves = run(auto(clock, told), clock, 4000, 1.0, Landed(0, 20.0, 4.0, ""))
    assert saves[:2] == [20, 40]  # not measured yet
    assert told[0].decided_by == told[1].decided_by == "unmeasured"
    gaps = [b - a for a, b in pairwise(saves[1:])]
    last = told[-1]
    assert isinstance(last, IntervalPlanned) and last.decided_by == "optimum"
    assert (last.step_s, last.cost_s, last.write_s) == (1.0, 4.0, 20.0)
    assert last.mtbf_s == pytest.approx(28800 + clock.now, rel=0.2)
    assert gaps[0] == pytest.approx(optimum(28800, 4.0), rel=0.05)
    assert gaps == sorted(gaps)  # no failure yet: always a little rarer
    assert last.step == saves[-1] and last.steps == round(optimum(last.mtbf_s, 4.0))


def test_failures_before_this_start_make_saves_more_frequent() -> None:
    calm, stormy = [], []
    for told, failures in ((calm, 0), (stormy, 30)):
        clock = Clock()
        history = {"failures": failures, "observed_s": 3600.0}
        run(auto(clock, told, **history), clock, 1500, 1.0, Landed(0, 20.0, 4.0, ""))
    assert stormy[2].failures == 30
    assert stormy[2].steps < calm[2].steps / 4


def test_saves_never_meet() -> None:
    clock, told = Clock(), []
    saves = run(auto(clock, told), clock, 3000, 1.0, Landed(0, 900.0, 0.01, ""))
    assert told[2].decided_by == "least"
    assert min(b - a for a, b in pairwise(saves[1:])) == 900
