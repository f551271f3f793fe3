import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrel.events import (
    Evaluated,
    FailureDetected,
    PhaseBegan,
    Record,
    StepCompleted,
    Unknown,
    to_json,
)
from jaxrel.exit_codes import DataRefusedError, UsageError
from jaxrel.ledger.accounting import account
from jaxrel.ledger.reader import highest_attempt, read
from tests.ledger.records import at, failed, phase, resumed, started, step, write_segment


def line(record: Record, **changed: object) -> str:
    return json.dumps(to_json(record) | changed) + "\n"


RUN = [started(0, 1), resumed(1, 1, 0), phase(2, 1, "train"), step(3, 1, 1), step(4, 1, 2)]
LINES = [line(record) for record in RUN]


@pytest.mark.core
def test_a_torn_last_line_is_dropped_and_counted(tmp_path: Path) -> None:
    write_segment(tmp_path, "a", [*LINES[:4], LINES[4][:-20]])
    write_segment(tmp_path, "b", ['{"v":1,"t":\0\0\0'])
    journal = read(tmp_path)
    assert journal.records == RUN[:4]
    assert (journal.torn, journal.damaged, journal.segments) == (2, [], 2)


def test_a_complete_record_without_its_newline_counts(tmp_path: Path) -> None:
    write_segment(tmp_path, "a", [*LINES[:4], LINES[4][:-1]])
    assert (read(tmp_path).records, read(tmp_path).torn) == (RUN, 0)


@pytest.mark.core
@pytest.mark.parametrize(
    "bad",
    [
        "garbage\n",
        '{"v":1,"t":5\n',
        "[1, 2]\n",
        "7\n",
        '{"v": 0, "t": 1, "attempt": 1, "by": "rank0", "event": "GangDead"}\n',
        '{"v": 1, "t": 1.5, "attempt": 1, "by": "rank0", "event": "GangDead"}\n',
        '{"v": 1, "t": 1, "attempt": -1, "by": "rank0", "event": "GangDead"}\n',
        '{"v": 1, "t": 1' + "0" * 30 + ', "attempt": 1, "by": "rank0", "event": "GangDead"}\n',
        '{"v": 1, "t": 1, "attempt": 1, "by": "rank0", "event": "Resumed"}\n',
        line(RUN[3], step="three"),
        line(RUN[3], step=True),
        line(RUN[3], step=None),
        line(RUN[3], step=2**70),
        line(RUN[3], groups=[1]),
        line(RUN[2], phase=7),
        line(RUN[2], event=["x"]),
        "[" * 100_000 + "\n",
        "9" * 10_000 + "\n",
        "\0" * 100 + "\n",
    ],
)
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, bad: str) -> None:
    write_segment(tmp_path, "000001-rank0-aa", [*LINES[:2], bad, *LINES[2:]])
    journal = read(tmp_path)
    assert journal.records == RUN
    (damage,) = journal.damaged
    assert (damage.file, damage.line) == ("000001-rank0-aa.jsonl", 3)
    assert damage.error


def test_bytes_that_are_no_text_are_damage(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "a", [])
    path.write_bytes(b"\xff\xfe{}\n" + LINES[0].encode())
    assert (read(tmp_path).records, [d.line for d in read(tmp_path).damaged]) == (RUN[:1], [1])


@pytest.mark.core
def test_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    write_segment(tmp_path, "a", [LINES[0], line(RUN[1], v=2)])
    with pytest.raises(DataRefusedError, match=r"^ledger/a.jsonl, line 2: got version 2: .* 1;"):
        read(tmp_path)


def test_what_a_later_version_adds_is_kept_or_passed_over(tmp_path: Path) -> None:
    fields = {"event": "Gardened", "roses": 3}
    known = line(RUN[3], color="red")
    write_segment(tmp_path, "a", [line(RUN[0], **fields), known])
    first, second = read(tmp_path).records
    assert isinstance(first.event, Unknown)
    assert (first.event.name, first.event.values["roses"]) == ("Gardened", 3)
    assert second == RUN[3]


def test_null_for_a_number_that_must_be_one_is_a_number_that_is_not_finite(tmp_path: Path) -> None:
    record = at(5, 1, Evaluated(1, None, 100, 1.0))
    write_segment(tmp_path, "a", [line(record, seconds=None), line(step(6, 1, 2), data_s=3)])
    first, second = read(tmp_path).records
    assert isinstance(first.event, Evaluated)
    assert isinstance(second.event, StepCompleted)
    assert first.event.seconds != first.event.seconds
    assert (first.event.loss, second.event.data_s) == (None, 3)


def test_a_field_that_may_be_null_stays_so(tmp_path: Path) -> None:
    write_segment(tmp_path, "a", [line(failed(5, 1, None))])
    (record,) = read(tmp_path).records
    assert isinstance(record.event, FailureDetected)
    assert record.event.after_s is None


@pytest.mark.core
def test_one_order_by_time_in_which_each_segment_keeps_its_own(tmp_path: Path) -> None:
    # The second segment's clock steps back after its first record.
    write_segment(tmp_path, "a", [line(phase(t, 1, "join")) for t in (1, 3, 5)])
    other = [phase(4, 1, name, "rank1") for name in ("start", "join", "restore")]
    times = (4, 2, 6)
    write_segment(tmp_path, "b", [line(r, t=t * 10**6) for r, t in zip(other, times, strict=True)])
    found = [(r.time_us // 10**6, r.source, r.event) for r in read(tmp_path).records]
    join = PhaseBegan("join")
    assert found == [
        (1, "rank0", join),
        (3, "rank0", join),
        (4, "rank1", PhaseBegan("start")),
        (4, "rank1", join),  # said 2: the segment's order is certain, its clock is not
        (5, "rank0", join),
        (6, "rank1", PhaseBegan("restore")),
    ]


def test_a_segment_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    write_segment(tmp_path, "a", LINES)
    (tmp_path / "ledger/b.jsonl").mkdir()
    (tmp_path / "ledger/notes.txt").write_text("not of the ledger")
    journal = read(tmp_path)
    assert journal.records == RUN
    assert [(d.file, d.line) for d in journal.damaged] == [("b.jsonl", 0)]


def test_no_run_and_no_ledger_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="^RUN: got '.*absent': expected the directory of a run$"):
        read(tmp_path / "absent")
    with pytest.raises(UsageError, match="it has no ledger"):
        read(tmp_path)


def test_the_highest_attempt_is_read_off_the_names(tmp_path: Path) -> None:
    assert highest_attempt(tmp_path) == 0
    for name in ("000002-rank0-aa", "000011-leader-bb", "999999", "000099-rank0", "x-rank0-aa"):
        write_segment(tmp_path, name, [])
    assert highest_attempt(tmp_path) == 11


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_whatever_happens_to_the_bytes_every_second_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = tmp_path_factory.mktemp("run")
    content = bytearray("".join(LINES).encode())
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                content[place] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                content = content[: place + 1]
            case "insert":
                content[place:place] = data.draw(st.binary(max_size=9))
    write_segment(run, "000001-rank0-aa", []).write_bytes(content)
    try:
        journal = read(run)
    except DataRefusedError:  # a flipped bit made it a later version
        return
    accounting = account(journal.records)
    total = accounting.effective_us + sum(accounting.badput_us.values())
    assert total == accounting.wall_us
    assert len(journal.records) + len(journal.damaged) + journal.torn >= 1


def test_many_records_are_read_in_seconds(tmp_path: Path) -> None:
    one = line(at(0, 1, StepCompleted(1, loss=2.0))).replace('"t": 0', '"t": %d')
    lines = [one % (second * 10**6) for second in range(10_000)]
    for name in ("000001-rank0-aa", "000001-rank0-bb", "000001-rank0-cc", "000001-rank0-dd"):
        write_segment(tmp_path, name, lines)
    begun = time.monotonic()
    journal = read(tmp_path)
    assert len(journal.records) == 40_000
    assert account(journal.records).wall_us == 9_999 * 10**6
    assert time.monotonic() - begun < 30
