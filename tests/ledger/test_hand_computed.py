"""Ten ledgers small enough to account for by hand; each shows the sum. Times in seconds."""

import pytest

from jaxrel.events import AttemptEnded, Finished, GangDead, JobEnded, JobStarted, Record
from jaxrel.ledger.accounting import BADPUT, account
from tests.ledger.records import (
    SECOND,
    at,
    evaluated,
    failed,
    lead,
    phase,
    resumed,
    saved,
    spawned,
    started,
    step,
)

pytestmark = pytest.mark.core


def seconds(records: list[Record], now: float | None = None) -> dict[str, float]:
    """Seconds by category, without those that have none."""
    accounting = account(records, None if now is None else round(now * SECOND))
    assert set(accounting.badput_us) == set(BADPUT)
    total = accounting.effective_us + sum(accounting.badput_us.values())
    assert total == accounting.wall_us
    times = {"wall": accounting.wall_us, "effective": accounting.effective_us}
    times |= accounting.badput_us
    return {name: us / SECOND for name, us in times.items() if us}


def begun(at_s: float, attempt: int, step_: int) -> list[Record]:
    """8 s to the first step: start 2, join 1, restore 1, compile 4."""
    return [
        started(at_s, attempt),
        phase(at_s, attempt, "start"),
        phase(at_s + 2, attempt, "join"),
        phase(at_s + 3, attempt, "restore"),
        resumed(at_s + 4, attempt, step_),
        phase(at_s + 4, attempt, "compile"),
        phase(at_s + 8, attempt, "train"),
    ]


def test_1_an_undisturbed_run_without_a_leader() -> None:
    records = [
        *begun(0, 1, 0),
        step(10, 1, 1, data_s=0.5),  # 8..10: data 0.5, step 1.5
        step(13, 1, 2, checkpoint_s=0.25, evaluation_s=1.0),  # 10..13: 0.25, 1.0, step 1.75
        step(15, 1, 3, checks_s=0.5),  # 13..15: checks 0.5, step 1.5
        phase(15, 1, "stop"),
        at(16, 1, Finished(3, "aa")),  # 15..16: stop
    ]
    # effective 1.5 + 1.75 + 1.5 = 4.75; 2 + 1 + 1 + 4 + 0.5 + 0.25 + 1 + 0.5 + 1 + 4.75 = 16
    assert seconds(records) == {
        "wall": 16, "effective": 4.75, "start": 2, "join": 1, "restore": 1, "compile": 4,
        "data": 0.5, "checkpoint": 0.25, "evaluation": 1, "checks": 0.5, "stop": 1,
    }  # fmt: skip


def test_2_a_kill_under_a_leader() -> None:
    records = [
        lead(0, 0, JobStarted(["x"], ["host0", "host1"], 2)),
        spawned(1, 1),  # 0..1: start
        *begun(2, 1, 0),  # 1..2: start; then start 2, join 1, restore 1, compile 4
        *(step(10 + 2 * n, 1, n) for n in (1, 2, 3)),  # 10..16: three steps of 2
        # 16..18 of step 4 are lost, killed at 18, seen at 19, dead at 22, started again at 25.
        failed(19, 1, 1.0),
        lead(22, 1, GangDead()),
        lead(22, 1, AttemptEnded(70)),
        spawned(25, 2),
        *begun(26, 2, 2),  # goes on from step 2: step 3 was in vain
        step(36, 2, 3),
        step(38, 2, 4),  # 34..38: two steps of 2
        at(38, 2, Finished(4, "aa")),
        lead(40, 2, AttemptEnded(0)),
        lead(40, 2, JobEnded(0)),  # 38..40: stop
    ]
    # effective: steps 1, 2 of the first attempt, 3, 4 of the second: 8
    # rework: step 3 (2) and the beginning of step 4 (2); start: 1 + 1 + 2 + 1 + 2
    # 8 + 7 + 2 + 2 + 8 + 4 + 1 + (3 + 2) + 3 = 40
    assert seconds(records) == {
        "wall": 40, "effective": 8, "start": 7, "join": 2, "restore": 2, "compile": 8,
        "rework": 4, "detection": 1, "stop": 5, "restart_wait": 3,
    }  # fmt: skip


def test_3_killed_without_a_leader_and_started_again_an_hour_later() -> None:
    records = [
        *begun(0, 1, 0),
        step(10, 1, 1),  # 2, effective
        step(12, 1, 2),  # 2, in vain
        evaluated(13, 1, 2, 0.5),  # 12..13: training that no step closes: rework
        *begun(3613, 2, 1),  # 13..3613: idle
        step(3624, 2, 2),  # 3621..3624: 3, effective
    ]
    # 5 + 4 + 2 + 2 + 8 + (2 + 1) + 3600 = 3624
    assert seconds(records) == {
        "wall": 3624, "effective": 5, "start": 4, "join": 2, "restore": 2, "compile": 8,
        "rework": 3, "idle": 3600,
    }  # fmt: skip


def test_4_a_failure_before_anything_is_compiled() -> None:
    records = [
        spawned(0, 1),
        started(1, 1),
        phase(3, 1, "join"),  # 0..3: start
        failed(10, 1, 4.0),  # 3..6: join; 6..10: detection
        lead(11, 1, GangDead()),  # stop 1
        spawned(11.5, 2),  # restart_wait 0.5
        *begun(12, 2, 0),  # start 0.5 + 2, join 1, restore 1, compile 4
        step(21, 2, 1),  # 1
    ]
    # 1 + 5.5 + 4 + 1 + 4 + 4 + 1 + 0.5 = 21
    assert seconds(records) == {
        "wall": 21, "effective": 1, "start": 5.5, "join": 4, "restore": 1, "compile": 4,
        "detection": 4, "stop": 1, "restart_wait": 0.5,
    }  # fmt: skip


def test_5_falling_back_further_than_the_last_resumption() -> None:
    records = [
        *begun(0, 1, 0),
        *(step(8 + n, 1, n) for n in (1, 2, 3, 4)),  # 8..12: four steps of 1
        *begun(12, 2, 3),  # idle 0; 8
        *(step(20 + 2 * n, 2, 3 + n) for n in (1, 2)),  # 20..24: steps 4, 5, of 2 each
        *begun(24, 3, 1),  # the checkpoint of step 3 was damaged: on from step 1
        *(step(32 + 3 * n, 3, 1 + n) for n in (1, 2)),  # 32..38: steps 2, 3, of 3 each
    ]
    # effective: step 1 (1) of the first attempt, 2 and 3 (6) of the third = 7
    # rework: 2, 3, 4 of the first (3), 4 and 5 of the second (4) = 7; 24 until training: 38
    assert seconds(records) == {
        "wall": 38, "effective": 7, "start": 6, "join": 3, "restore": 3, "compile": 12,
        "rework": 7,
    }  # fmt: skip


def test_6_a_zombie_and_a_step_that_is_complete_twice() -> None:
    records = [
        spawned(0, 1),
        *begun(0, 1, 0),
        step(10, 1, 1),  # 2, effective
        step(13, 1, 1),  # 3: once is enough: rework
        failed(14, 1, None),  # when it happened is unknown: 13..14 rework, no detection
        phase(14.25, 1, "train"),  # the attempt is over: moves nothing
        step(14.75, 1, 2),
        lead(15, 1, GangDead()),  # stop 1
        spawned(15, 2),
        step(16, 1, 2),  # an older attempt moves nothing either
        *begun(17, 2, 1),  # 15..17: start 2; then start 2, join 1, restore 1, compile 4
        step(26, 2, 2),  # 1, effective
        resumed(26.5, 1, 1),  # nor does an older attempt take step 2 away from attempt 2
        step(27, 2, 3),  # 1, effective
    ]
    # effective 2 + 1 + 1; rework 3 + 1; start 2 + 2 + 2; 4 + 4 + 6 + 2 + 2 + 8 + 1 = 27
    assert seconds(records) == {
        "wall": 27, "effective": 4, "start": 6, "join": 2, "restore": 2, "compile": 8,
        "rework": 4, "stop": 1,
    }  # fmt: skip


def test_7_a_resumption_from_a_step_that_the_ledger_never_saw() -> None:
    records = [
        *begun(0, 1, 0),
        step(10, 1, 1),  # 2, effective
        resumed(5010, 1, 100),  # in the midst of training, after 5000 s: rework
        step(5011, 1, 101),  # 1, given up below: rework
        step(5013, 1, 50),  # 2: not beyond step 100: rework
        resumed(5014, 1, 1),  # the same process falls back: 1, rework
        step(5016, 1, 2),  # 2, effective
    ]
    # effective 2 + 2; rework 5000 + 1 + 2 + 1; 8 to the first step: 4 + 5004 + 8 = 5016
    assert seconds(records) == {
        "wall": 5016, "effective": 4, "start": 2, "join": 1, "restore": 1, "compile": 4,
        "rework": 5004,
    }  # fmt: skip


def test_8_missing_events() -> None:
    records = [
        phase(0, 1, "train"),
        step(5, 1, 1),  # who never said what it resumed from: unknown 5
        step(9, 2, 2),  # 5..9: nobody led attempt 1: idle; no phase either
        resumed(10, 2, 2),  # 9..10: unknown
        phase(12, 2, "compile"),  # 10..12: unknown
        step(14, 2, 3),  # not in training
        phase(17, 2, "train"),  # 12..17: compile
        step(20, 2, 4, data_s=99.0),  # 17..20: says 99 of data, there are 3
        step(21, 2, 5, data_s=float("nan"), checkpoint_s=-7.0),  # 1, effective
        phase(23, 2, "gardening"),  # 21..23: training that another attempt follows: rework
        phase(30, 3, "train"),  # 23..30: idle
        step(31, 3, 6),  # 1, unknown: attempt 3 did not say what it resumed from either
    ]
    # unknown 5 + 1 + 2 + 1; idle 4 + 7; 1 + 9 + 11 + 5 + 3 + 2 = 31
    assert seconds(records) == {
        "wall": 31, "effective": 1, "unknown": 9, "idle": 11, "compile": 5, "data": 3,
        "rework": 2,
    }  # fmt: skip


def test_9_a_leader_that_vanished_and_a_job_that_ended() -> None:
    records = [
        spawned(0, 1),
        *begun(0, 1, 0),
        step(10, 1, 1),  # 2, effective
        step(12, 1, 2),  # 2, effective
        # The machine lost power at 12; someone launched again at 100.
        lead(100, 0, JobStarted(["x"], ["host0"], 1)),  # 12..100: idle
        spawned(101, 2),  # start 1
        *begun(101, 2, 2),
        step(110, 2, 3),  # 109..110: 1, effective
        phase(111, 2, "stop"),  # 110..111: training that ends in order: stop
        lead(112, 2, AttemptEnded(75)),  # stop 1
        lead(113, 2, JobEnded(75)),  # restart_wait 1
        lead(213, 0, JobStarted(["x"], ["host0"], 1)),  # idle 100
        spawned(214, 3),  # start 1
    ]
    # effective 5; start 2 + 1 + 2 + 1; 5 + 6 + 2 + 2 + 8 + 2 + 1 + 188 = 214
    assert seconds(records) == {
        "wall": 214, "effective": 5, "start": 6, "join": 2, "restore": 2, "compile": 8,
        "stop": 2, "restart_wait": 1, "idle": 188,
    }  # fmt: skip


def test_10_phases_within_training_and_the_tail_of_a_run_seen_later() -> None:
    records = [
        *begun(0, 1, 0),
        step(10, 1, 1),  # 2, effective
        phase(11, 1, "evaluation"),  # 10..11 belongs to step 2, which goes on after it
        phase(14, 1, "train"),  # evaluation 3
        step(16, 1, 2, data_s=1.5),  # 10..11 and 14..16: data 1.5, step 1.5
        at(17, 1, Finished(2, "aa"), source="rank1"),  # of another rank: moves nothing
        evaluated(18, 1, 2, 1.5),
        saved(20, 1, 1, 0.5),  # of step 1: was in step 2's time already
        saved(20, 1, 2, 0.25),
        phase(21, 1, "stop"),  # 16..21: checkpoint 0.25, evaluation 1.5, the rest stop 3.25
        at(22, 1, Finished(2, "aa")),  # stop 1
    ]
    expected = {
        "wall": 22, "effective": 3.5, "start": 2, "join": 1, "restore": 1, "compile": 4,
        "data": 1.5, "evaluation": 4.5, "checkpoint": 0.25, "stop": 4.25,
    }  # fmt: skip
    # 3.5 + 8 + 1.5 + 4.5 + 0.25 + 4.25 = 22
    assert seconds(records) == expected
    # Looked at 8 s after its last record, nobody was there: idle.
    assert seconds(records, now=30) == {**expected, "wall": 30, "idle": 8}
    # One that is in training may still be at it: unknown.
    assert seconds(records[:8], now=16)["unknown"] == 6
