import json
import logging
import math
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrel
from jaxrel.events import (
    Evaluated,
    Event,
    Finished,
    GangDead,
    PhaseBegan,
    RecordsLost,
    Resumed,
    StepCompleted,
    WorkerStarted,
)
from jaxrel.exit_codes import UsageError
from jaxrel.ledger import Ledger
from jaxrel.ledger.accounting import account
from jaxrel.ledger.reader import Journal, read, segments
from tests.ledger.records import SECOND, FakeClock


@pytest.fixture(autouse=True)
def no_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXREL_ATTEMPT", raising=False)


def events(run_dir: Path) -> list[Event]:
    return [record.event for record in read(run_dir).records]


@pytest.mark.core
def test_what_is_written_is_read(tmp_path: Path) -> None:
    clock = FakeClock(wall_s=1_000)
    written = [WorkerStarted(0, 2, 9, "h"), PhaseBegan("train"), StepCompleted(1, loss=0.5)]
    with Ledger(tmp_path / "run", source="rank3", attempt=4, clock=clock) as ledger:
        for event in written:
            clock.sleep(1.5)
            ledger.write(event)
        ledger.sync()
        assert events(tmp_path / "run") == written  # nothing waits in a buffer
    records = read(tmp_path / "run").records
    assert [r.time_us for r in records] == [1_001_500_000, 1_003_000_000, 1_004_500_000]
    assert {(r.attempt, r.source) for r in records} == {(4, "rank3")}


@pytest.mark.core
def test_a_clock_that_is_set_changes_nothing_within_a_segment(tmp_path: Path) -> None:
    clock = FakeClock(wall_s=1_000)
    with Ledger(tmp_path, clock=clock) as ledger:
        for stepped in (0, -500, +900):
            clock.wall += stepped * SECOND
            clock.sleep(1)
            ledger.write(GangDead())
    assert [r.time_us // SECOND for r in read(tmp_path).records] == [1_001, 1_002, 1_003]


def test_what_happened_before_the_ledger_was_open_keeps_its_time(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=FakeClock(wall_s=1_000)) as ledger:
        ledger.write(PhaseBegan("start"), ago_s=2.5)
        ledger.write(PhaseBegan("join"))
    assert [r.time_us for r in read(tmp_path).records] == [997_500_000, 1_000_000_000]


def test_attempts_count_on_over_the_life_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(**given: Any) -> int:
        with Ledger(tmp_path, **given) as ledger:
            return ledger.attempt

    assert [opened(), opened(), opened(attempt=7, source="leader"), opened()] == [1, 2, 7, 8]
    assert opened(attempt=0, source="leader") == 0
    monkeypatch.setenv("JAXREL_ATTEMPT", "5")
    assert opened() == 5
    assert opened(attempt=6) == 6


def test_no_two_writers_share_a_segment(tmp_path: Path) -> None:
    ledgers = [Ledger(tmp_path, attempt=1) for _ in range(5)]
    for i, ledger in enumerate(ledgers):
        ledger.write(StepCompleted(i))
        ledger.close()
    assert len(segments(tmp_path)) == len(read(tmp_path).records) == 5


@pytest.mark.core
def test_a_leader_goes_on_as_another_attempt(tmp_path: Path) -> None:
    with Ledger(tmp_path, source="leader", attempt=1) as leader:
        leader.write(GangDead())
        leader.begin_attempt(2)
        leader.write(GangDead())
    assert [record.attempt for record in read(tmp_path).records] == [1, 2]
    with Ledger(tmp_path) as worker:
        assert worker.attempt == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"source": "../rank0"},
            "^source: got '../rank0': expected leader, or rank and a num",
        ),
        ({"source": ""}, "^source: got ''"),
        ({"attempt": -1}, "^attempt: got -1: expected a number from 0$"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Ledger(tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_leader_that_sets_nonsense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXREL_ATTEMPT", "two")
    with pytest.raises(UsageError, match="^JAXREL_ATTEMPT: got 'two': expected a number$"):
        Ledger(tmp_path)


@pytest.mark.core
def test_a_directory_that_cannot_be_made_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("in the way")
    with pytest.raises(UsageError, match=rf"^ledger directory {tmp_path}/ledger: cannot write"):
        Ledger(tmp_path)


@pytest.mark.core
def test_no_json_but_json(tmp_path: Path) -> None:
    """Not NaN, not arrays: any reader of JSON reads every line."""
    with Ledger(tmp_path) as ledger:
        ledger.write(StepCompleted(1, loss=math.nan, data_s=math.inf, groups={"q": [math.nan, 1]}))
        ledger.step(
            np.int64(2),  # pyright: ignore[reportArgumentType]
            loss=jnp.bfloat16(1.5),
            grad_norm=np.float32(math.inf),
            groups={"loss": jnp.arange(3.0), 7: object},
        )
        ledger.write(Evaluated(2, np.float64(2.5), 3, float("nan")))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (path,) = segments(tmp_path)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    first, _, second, third = events(tmp_path)
    assert isinstance(first, StepCompleted)
    assert isinstance(third, Evaluated)
    assert (first.loss, first.groups) == (None, {"q": [None, 1]})
    assert second == StepCompleted(2, 1.5, groups={"loss": [0, 1, 2], "7": str(object)})
    assert third.loss == 2.5


@pytest.mark.core
def test_a_loop_of_ones_own_needs_two_lines(tmp_path: Path) -> None:
    clock = FakeClock()
    with jaxrel.Ledger(tmp_path, clock=clock) as ledger:
        clock.sleep(3)
        ledger.resumed(10, devices=8)
        clock.sleep(20)
        for number in (11, 12, 13):
            clock.sleep(2)
            ledger.step(number, loss=1.0, data_s=0.5)
        ledger.write(Finished(13, "aa"))
    accounting = account(read(tmp_path).records)
    badput = {name: us // SECOND for name, us in accounting.badput_us.items() if us}
    # The first step is where the step is compiled; the two others are 1.5 s each.
    assert badput == {"start": 3, "compile": 22, "data": 1}
    assert accounting.effective_us == 3 * SECOND
    assert Resumed(10, 8, 1) in events(tmp_path)


def test_going_on_in_the_same_process_compiles_again(tmp_path: Path) -> None:
    with Ledger(tmp_path, source="rank2") as ledger:
        for _ in range(2):
            ledger.resumed(0, devices=8, processes=4)
            ledger.step(1)
            ledger.step(2)
    names = [e.phase if isinstance(e, PhaseBegan) else type(e).__name__ for e in events(tmp_path)]
    once = ["Resumed", "compile", "train", "StepCompleted", "StepCompleted"]
    assert names == ["WorkerStarted", *once, *once]
    first = events(tmp_path)[0]
    assert isinstance(first, WorkerStarted)
    assert (first.process, first.processes, first.pid) == (2, 4, os.getpid())


class FullDisk:
    """Takes so many bytes more, then none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self._write = room, os.write
        monkeypatch.setattr("os.write", self.write)

    def write(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = self._write(file, data[: self.room])
        self.room -= taken
        return taken


@pytest.mark.core
@pytest.mark.parametrize("room", [0, 1, 40])
def test_what_a_full_disk_lost_is_on_record_once_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    ledger = Ledger(tmp_path)
    ledger.write(StepCompleted(1))
    disk = FullDisk(monkeypatch, room)
    with caplog.at_level(logging.WARNING):
        for number in (2, 3, 4):
            ledger.write(StepCompleted(number))
        ledger.sync()
    disk.room = 1_000_000
    ledger.write(StepCompleted(5))
    ledger.close()
    first, lost, last = events(tmp_path)
    assert (first, last) == (StepCompleted(1), StepCompleted(5))
    assert lost == RecordsLost("ledger", 3, "[Errno 28] No space left on device")
    assert len(caplog.records) == 1
    assert f"ledger {tmp_path}/ledger: cannot write" in caplog.text
    journal = read(tmp_path)
    assert len(journal.damaged) == (room > 0)  # the part of a line that the disk took


def test_room_that_comes_back_before_the_end_is_used_to_say_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path)
    disk = FullDisk(monkeypatch, 0)
    ledger.write(GangDead())
    disk.room = 1_000_000
    ledger.close()
    ledger.close()
    ledger.write(GangDead())  # too late, and no error
    ledger.sync()
    assert [e.count for e in events(tmp_path) if isinstance(e, RecordsLost)] == [1]


def test_a_second_outage_warns_again_and_counts_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path)
    disk = FullDisk(monkeypatch, 0)
    for lost in (2, 3):
        disk.room = 0
        for _ in range(lost):
            ledger.write(GangDead())
        disk.room = 1_000_000
        ledger.write(GangDead())
    ledger.close()
    assert [e.count for e in events(tmp_path) if isinstance(e, RecordsLost)] == [2, 3]
    assert len(caplog.records) == 2


@pytest.mark.core
def test_a_file_size_limit_cuts_a_line_and_not_the_run(tmp_path: Path) -> None:
    """The real thing: the kernel takes a part of a line, then refuses."""
    code = """
        import resource, sys
        from jaxrel.events import StepCompleted
        from jaxrel.ledger import Ledger
        ledger = Ledger(sys.argv[1])
        ledger.write(StepCompleted(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
        for number in range(2, 12):
            ledger.write(StepCompleted(number))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        ledger.write(StepCompleted(12))
        ledger.close()
        assert "jax" not in sys.modules and "rich" not in sys.modules
    """
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), tmp_path], check=True, timeout=60)
    journal = read(tmp_path)
    steps = [r.event.step for r in journal.records if isinstance(r.event, StepCompleted)]
    (lost,) = [r.event for r in journal.records if isinstance(r.event, RecordsLost)]
    assert steps == [*range(1, 12 - lost.count), 12]
    assert len(journal.damaged) == 1


@pytest.mark.core
@pytest.mark.parametrize("gone", ["segment", "ledger", "run"])
def test_what_was_deleted_meanwhile_is_counted(
    tmp_path: Path, gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with Ledger(run) as ledger:
        ledger.write(StepCompleted(1))
        ledger.write(StepCompleted(2))
        if gone == "segment":
            segments(run)[0].unlink()
        else:
            shutil.rmtree(run if gone == "run" else run / "ledger")
        ledger.write(StepCompleted(3))
        run.mkdir(exist_ok=True)
        ledger.write(StepCompleted(4))
    assert caplog.records
    found = events(run)
    (lost,) = [event for event in found if isinstance(event, RecordsLost)]
    steps = [event.step for event in found if isinstance(event, StepCompleted)]
    assert (lost.count, steps) == ((3, [4]) if gone == "run" else (2, [3, 4]))


def test_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:

        def write(thread: int) -> None:
            for i in range(200):
                ledger.write(StepCompleted(thread * 1000 + i, groups={"x": [0.5] * 50}))

        threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    journal: Journal = read(tmp_path)
    assert (len(journal.records), journal.damaged, journal.torn) == (800, [], 0)


def test_times_of_one_segment_never_step_back_between_threads(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        threads = [
            threading.Thread(target=lambda: [ledger.write(GangDead()) for _ in range(100)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    (path,) = segments(tmp_path)
    times = [json.loads(line)["t"] for line in path.read_text().splitlines()]
    assert times == sorted(times)
