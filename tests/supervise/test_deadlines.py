"""How long who may be silent."""

from dataclasses import replace

import pytest

from jaxrel.heartbeat import Beat
from jaxrel.supervise.deadlines import Deadlines, Pace, Stopwatch, due
from jaxrel.supervise.ranks import Rank


def rank(phase: str, at: float, done: int = 5, **more: object) -> Rank:
    return replace(Rank(0, "host0", at, Beat(phase, done, done)), **more)  # type: ignore[arg-type]


@pytest.mark.core
@pytest.mark.parametrize(
    ("phase", "floor", "pace", "limit"),
    [
        ("wait", 60.0, Pace(), 60.0),
        ("wait", 60.0, Pace(first_s=90.0), 90.0),  # no step can take longer than with compiling
        ("data", 60.0, Pace(5, 2.0), 60.0),
        ("data", 60.0, Pace(5, 8.0), 80.0),
        ("step", 60.0, Pace(19, 30.0), 300.0),
        ("step", 60.0, Pace(20, 30.0), 92.0),
        ("wait", 5.0, Pace(20, 0.5), 5.0),
        ("wait", 5.0, Pace(20, 1.5), 6.5),
        ("compile", 60.0, Pace(20, 1.5), 1200.0),
        ("compile", 5.0, Pace(), 100.0),
        ("evaluation", 1.0, Pace(), 30.0),
        ("failed", 60.0, Pace(), 10.0),
    ],
)
def test_limits(phase: str, floor: float, pace: Pace, limit: float) -> None:
    assert Deadlines(floor).limit_s(phase, pace) == limit


def test_who_is_behind_is_what_counts() -> None:
    limits, pace = Deadlines(10.0), Pace()
    # Rank 1 waits for rank 0, which saves: its own limit is over, rank 0's is not.
    saving, waiting = rank("checkpoint", 100.0), rank("wait", 100.0, 6)
    assert due([saving, waiting], pace, limits, True) == 300.0
    # When rank 0 goes on, rank 1's wait before does not count against it.
    assert due([rank("wait", 250.0, 6), waiting], pace, limits, True) == 260.0
    # Nobody may be silent longer than the longest limit, whoever is behind.
    busy = rank("data", 290.0)
    assert due([busy, waiting], pace, limits, True) == 300.0


def test_stopped_failed_and_unknown() -> None:
    limits, pace = Deadlines(10.0), Pace()
    stopped = rank("wait", 100.0, stopped_at=101.0)
    assert due([stopped, rank("wait", 100.0)], pace, limits, True) == 106.0
    assert due([stopped], pace, limits, False) == 106.0
    failed = rank("failed", 100.0, 7)
    assert due([failed, rank("checkpoint", 100.0)], pace, limits, True) == 110.0
    assert due([rank("spawned", 0.0, 0)], pace, limits, False) is None
    assert due([rank("spawned", 0.0, 0)], pace, limits, True) == 100.0
    assert due([rank("done", 0.0, code=0)], pace, limits, True) is None


def test_steps_are_measured_without_what_lies_between() -> None:
    watch, pace, beat = Stopwatch(), Pace(), Beat()
    life = [  # seconds, phase, completed
        (0, "start", 0), (5, "compile", 0), (30, "data", 1), (30, "wait", 1), (32, "data", 2),
        (33, "data", 3), (33.5, "evaluation", 4), (90, "data", 4), (91, "data", 5),
        (92, "checkpoint", 5), (150, "data", 5), (151, "data", 6), (152, "data", 9),
    ]  # fmt: skip
    for seconds, phase, done in life:
        new = Beat(phase, done, done, int(seconds * 1e9))
        watch, pace = watch(beat, new, pace)
        beat = new
    assert pace == Pace(steps=6, slowest_s=2.0, first_s=25.0)


def test_the_ladder_names_every_limit_in_order() -> None:
    text = Deadlines(60.0).ladder()
    order = ["agent 15 s", "step 60 s", "start, join", "600 s", "restore, compile", "1200 s"]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
