"""The document of `jaxrel report --json`."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrel.events import (
    AttemptEnded,
    Evaluated,
    Finished,
    GangDead,
    JobEnded,
    JobStarted,
    PhaseBegan,
    Record,
    RecordsLost,
    Unknown,
    WorkerFailed,
    to_json,
)
from jaxrel.ledger.reader import Damage, Journal
from jaxrel.ledger.summary import report, summarize
from tests.ledger.records import (
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
    write_segment,
)

BADPUT = (
    "start join compile restore rework checkpoint data evaluation checks triage detection stop"
    " restart_wait idle unknown"
).split()


def of(records: list[Record], **journal: Any) -> dict[str, Any]:
    given = {"segments": 1, "torn": 0, "damaged": []} | journal
    return summarize(Journal(sorted(records, key=lambda r: r.time_us), **given)).document


def worker(at_s: float, attempt: int, step_: int, lag: float = 0.0) -> list[Record]:
    """Two ranks up to training; rank 1 needs `lag` longer to join."""
    records = []
    for rank, late in (("rank0", 0.0), ("rank1", lag)):
        records += [
            started(at_s, attempt, rank),
            phase(at_s, attempt, "start", rank),
            phase(at_s + 2, attempt, "join", rank),
            phase(at_s + 3 + late, attempt, "restore", rank),
            phase(at_s + 7, attempt, "compile", rank),
            phase(at_s + 12, attempt, "train", rank),
        ]
    return [*records, resumed(at_s + 7, attempt, step_)]


KILLED = [
    lead(0, 0, JobStarted(["train"], ["host0", "host1"], 2)),
    spawned(1, 1),
    *worker(2, 1, 0),  # trains from 14
    step(15, 1, 1),
    step(16, 1, 2),
    evaluated(16.5, 1, 2, 0.5, loss=2.5),
    saved(17, 1, 2, 0.25, digest="bb"),
    step(18, 1, 3),
    step(19, 1, 4),
    evaluated(19.25, 1, 4, 0.5, loss=9.0),  # never saved: done again after the kill
    failed(20, 1, 0.5, step=4, following=[0]),
    lead(21.5, 1, GangDead()),
    lead(21.5, 1, AttemptEnded(70, "killed")),
    spawned(24, 2),
    *worker(25, 2, 2, lag=1.5),  # trains from 37
    step(39, 2, 3),
    step(40, 2, 4),
    evaluated(40.5, 2, 4, 0.5, loss=1.5),
    saved(41, 2, 4, 0.25, digest="cc"),
    step(42, 2, 5),
    saved(43, 2, 5, 0.25, digest="dd"),
    phase(43, 2, "stop"),
    at(44, 2, Finished(5, "dd")),
    lead(45, 2, AttemptEnded(0)),
    lead(45, 2, JobEnded(0)),
]


@pytest.mark.core
def test_a_run_that_was_killed_once() -> None:
    document = of(KILLED)
    assert (document["status"], document["steps"]) == ("finished", 5)
    assert document["final_state_digest"] == "dd"
    assert document["attempts"] == [
        {
            "id": 1, "resumed_from": 0, "devices": 8, "processes": 2, "exit": 70,
            "started": 1.0, "steps": 4,
        },
        {
            "id": 2, "resumed_from": 2, "devices": 8, "processes": 2, "exit": 0,
            "started": 24.0, "steps": 3,
        },
    ]  # fmt: skip
    assert [(e["step"], e["loss"]) for e in document["evaluations"]] == [(2, 2.5), (4, 1.5)]
    assert document["checkpoints"] == [
        {"step": n, "seconds": 0.5, "blocking_s": 0.25, "state_digest": digest}
        for n, digest in ((2, "bb"), (4, "cc"), (5, "dd"))
    ]
    assert (document["skipped"], document["verdicts"]) == ([], [])
    assert document["definition"].startswith("effective_training_time = effective_s / wall_s")


@pytest.mark.core
def test_each_part_of_a_recovery() -> None:
    (failure,) = of(KILLED)["failures"]
    phases = failure.pop("phases_s")
    assert failure == {
        "kind": "signal", "rank": 1, "host": "host1", "detail": "killed by SIGKILL", "step": 4,
        "following": [0], "attempt": 1, "detected_after_s": 0.5,
        "recovered_after_s": 22.5,  # from 19.5 to step 5 at 42: 3 and 4 are not new
        "steps_lost": 2,
    }  # fmt: skip
    assert phases == {
        "detect": 0.5,
        "stop": 1.5,  # 20 .. 21.5
        "wait": 2.5,  # 21.5 .. 24
        "start": 3.0,  # 24 .. 27
        "join": 2.5,  # 27 .. 29.5, of rank 1
        "restore": 4.0,  # 28 .. 32, of rank 0
        "compile": 5.0,
        "first_step": 2.0,
    }


def test_a_step_of_the_attempt_that_failed_is_no_recovery() -> None:
    """Rank 0 got one more step done before it was killed, and a zombie of it many more."""
    late = [step(20.5, 1, 5), step(30, 1, 99)]
    assert of([*KILLED, *late])["failures"][0]["recovered_after_s"] == 22.5


def test_a_finished_run_that_goes_on_has_no_final_state_yet() -> None:
    more = [started(50, 3), resumed(51, 3, 5), phase(51, 3, "train"), step(52, 3, 6)]
    document = of([*KILLED, *more])
    assert (document["status"], document["steps"]) == ("open", 6)
    assert document["final_state_digest"] is None


def test_what_has_not_happened_yet_is_not_known() -> None:
    """Seen right after the detection, with nobody to say when it happened."""
    records = [r for r in KILLED if r.time_us < 20e6]
    (failure,) = of([*records, failed(20, 1, None)])["failures"]
    assert set(failure["phases_s"].values()) == {None}
    for name in ("detected_after_s", "recovered_after_s", "steps_lost"):
        assert failure[name] is None
    document = of([*records, failed(20, 1, 0.5)])
    assert (document["status"], document["final_state_digest"]) == ("open", None)
    assert document["attempts"][0]["exit"] is None


def test_a_recovery_that_takes_two_attempts() -> None:
    """The second attempt fails in its turn before it has come further."""
    second = [r for r in KILLED if r.time_us < 39.5e6]
    again = [
        *second,
        failed(40, 2, 0.0),
        lead(40, 2, GangDead()),
        spawned(41, 3),
        *worker(41, 3, 2),
        step(54, 3, 3),
        step(55, 3, 4),
        step(56, 3, 5),
    ]
    first, other = of(again)["failures"]
    assert (first["recovered_after_s"], other["recovered_after_s"]) == (36.5, 16.0)
    assert (first["steps_lost"], other["steps_lost"]) == (2, 1)
    assert first["phases_s"]["first_step"] == 2.0  # of the attempt that followed it
    assert other["phases_s"]["first_step"] == 1.0


def test_an_attempt_fails_once_and_before_it_resumed_it_lost_nothing() -> None:
    records = [
        spawned(0, 1),
        started(1, 1),
        failed(2, 1, 0.0),
        failed(3, 1, 1.0),
        lead(4, 1, GangDead()),
        spawned(5, 2),
        *worker(6, 2, 0),
        step(19, 2, 1),
    ]
    (failure,) = of(records)["failures"]
    assert (failure["detected_after_s"], failure["steps_lost"]) == (0.0, 0)
    assert failure["recovered_after_s"] == 17.0


@pytest.mark.core
@pytest.mark.parametrize(
    ("last", "status", "reason"),
    [
        ([], "open", ""),
        ([at(50, 1, Finished(2, "aa"))], "finished", ""),
        ([at(50, 1, WorkerFailed("ValueError: x", 70))], "failed", "ValueError: x"),
        ([at(50, 1, WorkerFailed("asked to stop", 75))], "stopped", "asked to stop"),
        ([at(50, 1, WorkerFailed("ValueError: x", 70)), resumed(51, 2, 2)], "open", ""),
        ([at(50, 1, Finished(2, "aa")), resumed(51, 2, 2)], "open", ""),  # more steps asked for
        ([at(50, 1, Finished(2, "aa")), failed(51, 1, 0.0)], "open", ""),  # another rank's fault
        ([lead(50, 0, JobEnded(79, "no progress"))], "failed", "no progress"),
        ([lead(50, 0, JobEnded(75))], "stopped", "exit 75"),
        ([lead(50, 0, JobEnded(0))], "finished", ""),
        ([lead(50, 0, JobEnded(70)), lead(51, 0, JobStarted([], [], 1))], "open", ""),
        # A supervised worker's last words are not the job's.
        ([spawned(49, 2), started(50, 2), at(51, 2, WorkerFailed("E: x", 70))], "open", ""),
        # A zombie's neither.
        ([started(50, 2), at(51, 1, Finished(2, "aa"))], "open", ""),
    ],
)
def test_how_the_run_stands(last: list[Record], status: str, reason: str) -> None:
    records = [started(0, 1), resumed(1, 1, 0), phase(2, 1, "train"), step(3, 1, 1), *last]
    document = of(records)
    assert (document["status"], document["reason"]) == (status, reason)


def test_an_empty_ledger_has_a_report() -> None:
    document = of([])
    assert document["effective_training_time"] is None
    assert (document["wall_s"], document["effective_s"], document["steps"]) == (0, 0, None)
    assert (document["status"], document["attempts"], document["failures"]) == ("open", [], [])
    assert list(document["badput_s"]) == BADPUT


def test_a_zombie_changes_neither_evaluations_nor_checkpoints() -> None:
    late = [evaluated(45, 1, 4, 0.5, loss=77.0), saved(45, 1, 4, 0.5, digest="ee")]
    assert of([*KILLED, *late]) == of(KILLED)


def test_a_number_that_is_not_finite_is_null() -> None:
    records = [started(0, 1), resumed(1, 1, 0), at(2, 1, Evaluated(0, 1.0, 5, float("nan")))]
    document = of(records)
    assert document["evaluations"] == [{"step": 0, "loss": 1.0, "rows": 5, "seconds": None}]
    json.dumps(document, allow_nan=False)


def test_what_of_the_record_is_missing_is_said() -> None:
    records = [
        at(1, 1, RecordsLost("ledger", 3, "full")),
        at(2, 1, RecordsLost("ledger", 4, "full"), source="rank1"),
        at(3, 1, RecordsLost("tensorboard", 9, "full")),
        at(4, 1, Unknown("Gardened")),
    ]
    damage = of(records, torn=2, damaged=[Damage("a.jsonl", n, "bad") for n in range(30)])["damage"]
    assert damage.pop("lines") == [
        {"file": "a.jsonl", "line": n, "error": "bad"} for n in range(20)
    ]
    assert damage == {
        "torn": 2, "damaged": 30, "lost": {"ledger": 7, "tensorboard": 9},
        "unknown": {"Gardened": 1},
    }  # fmt: skip


@pytest.mark.core
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**52), st.lists(st.integers(0, 2**43), min_size=1, max_size=15), st.data())
def test_seconds_sum_to_the_microsecond(start: int, gaps: list[int], data: st.DataObject) -> None:
    names: Any = st.sampled_from(["start", "join", "restore", "compile", "stop", "checks", "?"])
    records, time = [], start
    for gap in gaps:
        records.append(Record(time, 1, "rank0", PhaseBegan(data.draw(names))))
        time += gap
    records.append(Record(time, 1, "rank0", Finished(1, "")))
    document = json.loads(json.dumps(summarize(Journal(records, 1, 0, [])).document))
    parts = [document["effective_s"], *document["badput_s"].values()]
    assert sum(Decimal(repr(part)) for part in parts) == Decimal(repr(document["wall_s"]))
    assert Decimal(repr(document["wall_s"])) == Decimal(time - start) / 10**6


def test_from_the_disk(tmp_path: Path) -> None:
    lines = [
        json.dumps(to_json(record)) + "\n" for record in sorted(KILLED, key=lambda r: r.time_us)
    ]
    write_segment(tmp_path, "a", [*lines, '{"v":1,'])
    document = report(tmp_path)
    assert document["damage"]["torn"] == 1
    assert {**document, "damage": {}} == {**of(KILLED), "damage": {}}
