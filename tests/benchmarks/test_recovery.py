"""The benchmark of recoveries splits time without losing any, and does not claim what it cannot."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import marks, recovery, restarts
from benchmarks.processes import Job, alive
from benchmarks.recovery import AGAIN, LOOP, PLAIN, RECOVERY
from benchmarks.restarts import Arm, Measured
from jaxrel.events import (
    AttemptStarted,
    Event,
    FailureDetected,
    GangDead,
    PhaseBegan,
    Record,
    StepCompleted,
)
from jaxrel.ledger.reader import read
from jaxrel.ledger.summary import report


def _record(at: float, attempt: int, source: str, event: Event) -> Record:
    return Record(round(at * 1e6), attempt, source, event)


def _attempt(number: int, began: float, steps: list[tuple[float, int]]) -> list[Record]:
    """Spawned at `began`, one second a phase; process 1 is a little later everywhere."""
    started = AttemptStarted(["host0", "host1"], "127.0.0.1:1")
    records = [_record(began, number, "leader", started)]
    for source, late in (("rank0", 0.0), ("rank1", 0.3)):
        for n, phase in enumerate(("start", "join", "restore", "compile", "train"), 1):
            event = PhaseBegan(phase)  # type: ignore[arg-type]
            records.append(_record(began + n + late, number, source, event))
    return records + [_record(at, number, "rank0", StepCompleted(step)) for at, step in steps]


def _failed_job() -> list[Record]:
    """Killed at 110.0 with step 13 complete, and started again from step 11."""
    return [
        *_attempt(3, 100.0, [(107.0, 11), (108.0, 12), (109.5, 13)]),
        _record(110.4, 3, "leader", FailureDetected("signal", 1, "host1", "SIGKILL", 0.4)),
        _record(110.6, 3, "leader", GangDead()),
        *_attempt(4, 110.7, [(117.0, 12), (118.0, 13), (119.5, 14)]),
    ]


def test_a_recovery_goes_from_the_kill_to_the_first_new_step() -> None:
    found = marks.of_recovery(_failed_job(), 3, 110.0)
    parts = marks.durations(found)
    assert parts == pytest.approx(
        {
            "detect": 0.4, "stop": 0.2, "wait": 0.1, "import": 1.0, "start": 1.0, "join": 1.0,
            "restore": 1.0, "compile": 1.0, "first_step": 1.3, "rework": 2.5,
        }
    )  # fmt: skip
    assert list(parts) == [part for part in marks.PARTS if part != "launch"]
    assert sum(parts.values()) == pytest.approx(119.5 - 110.0)
    assert marks.whole(parts) == pytest.approx(117.0 - 110.0), "steps done twice do not count"


def test_a_step_that_was_complete_before_does_not_end_a_recovery() -> None:
    records = [r for r in _failed_job() if r.event != StepCompleted(14)]
    with pytest.raises(LookupError, match="no step after 13"):
        marks.of_recovery(records, 3, 110.0)


def test_a_start_is_split_by_the_same_marks_as_a_recovery() -> None:
    parts = marks.durations(marks.of_start(_failed_job(), 3, 99.5))
    assert parts == pytest.approx(
        {
            "launch": 0.5, "import": 1.0, "start": 1.0, "join": 1.0, "restore": 1.0,
            "compile": 1.0, "first_step": 2.0,
        }
    )  # fmt: skip
    for missing in (StepCompleted, AttemptStarted):
        records = [r for r in _failed_job() if not isinstance(r.event, missing)]
        with pytest.raises(LookupError):
            marks.of_start(records, 3, 99.5)


LOOP_TOLD = """\
10 import
12 pid 70
12 start
13 join
15 restore
16 compile
18 first_step
19 step 7
20 step 8
25 ended 137 134
25.5 import
27 pid 80
27 start
28 join
29 restore
31 compile
32 first_step
35 step 7
36 step 8
37 step 9
"""


def test_the_shell_loop_is_split_alike_and_all_before_its_restart_is_detection() -> None:
    lines = LOOP_TOLD.splitlines()
    parts = marks.durations(marks.of_loop(lines, 20.5))
    assert parts == pytest.approx(
        {
            "detect": 5.0, "import": 1.5, "start": 1.0, "join": 1.0, "restore": 2.0,
            "compile": 1.0, "first_step": 3.0, "rework": 2.0,
        }
    )  # fmt: skip
    for told, why in ((lines[:10], "not started again"), (lines[:-1], "no step after 8")):
        with pytest.raises(LookupError, match=why):
            marks.of_loop(told, 20.5)


def test_a_restart_that_fails_as_well_counts_as_detection() -> None:
    lines = LOOP_TOLD.splitlines()
    lines[10:10] = ["25.1 import", "25.2 start", "25.3 ended 1 1"]
    assert marks.durations(marks.of_loop(lines, 20.5))["detect"] == pytest.approx(5.0)


def test_a_clock_that_steps_back_is_refused() -> None:
    with pytest.raises(ValueError, match="join is marked 2 s before start"):
        marks.durations([("start", 5.0), ("join", 3.0), (marks.END, 6.0)])


def test_cpu_time_is_of_the_part_in_which_it_was_used() -> None:
    samples = [(0.0, 0.0), (10.0, 5.0), (20.0, 25.0)]
    found = marks.cpu_of_parts([("join", 5.0), ("restore", 10.0), (marks.END, 15.0)], samples)
    assert found == pytest.approx({"join": 2.5, "restore": 10.0})


def _rounds(recovery_s: float, spread: float) -> list[dict[str, Any]]:
    """Plain starts of 5 s, one of them in `launch`; the control is off by up to `spread`."""

    def one(parts: dict[str, float], times: float = 1.0) -> dict[str, Any]:
        return {clock: {p: s * times for p, s in parts.items()} for clock in ("wall_s", "cpu_s")}

    plain, again = {"launch": 1.0, "import": 4.0}, {"detect": recovery_s, "rework": 50.0}
    return [
        {
            PLAIN: one(plain),
            AGAIN: one(plain, 1 + spread * (n % 3 - 1)),
            RECOVERY: one(again | ({"wait": 0.1} if n == 1 else {})),
            **({LOOP: one({"detect": 100.0 + n}) | {"facts": {"killed": n}}} if n < 2 else {}),
        }
        for n in range(9)
    ]


@pytest.mark.parametrize(
    "recovery_s, spread, expected",
    [(5.2, 0.01, "met"), (6.5, 0.01, "not met"), (5.2, 0.2, "undecided"), (6.5, 0.2, "undecided")],
)
def test_the_bar_is_judged_without_the_steps_done_twice(
    recovery_s: float, spread: float, expected: str
) -> None:
    judged = recovery.judge(_rounds(recovery_s, spread))
    for clock in ("wall_s", "cpu_s"):
        found = judged[clock]["recovery"]
        assert found["verdict"] == expected
        assert found["median"] == pytest.approx(recovery_s / 5)
        stricter = judged[clock]["recovery / start without launch"]
        assert stricter["median"] == pytest.approx(recovery_s / 4)
        for rank in (0, 1):
            loop = judged[clock][f"{LOOP}, rank {rank} / recovery"]
            assert loop["median"] == pytest.approx((100 + rank) / (recovery_s + 0.1 * rank))


def test_a_few_rounds_decide_nothing() -> None:
    for rounds, expected in ((5, "undecided"), (6, "met")):
        judged = recovery.judge(_rounds(5.2, 0.01)[:rounds])
        assert judged["wall_s"]["recovery"]["verdict"] == expected


def test_the_table_shows_every_arm(capsys: pytest.CaptureFixture[str]) -> None:
    recovery.show(recovery.judge(_rounds(5.2, 0.01)))
    told = capsys.readouterr().out
    row = next(line for line in told.splitlines() if line.startswith("total "))
    totals = ("5.000", "5.000", "5.200", "100.000", "101.000")
    assert row.split()[1::3] == row.split()[3::3] == list(totals)
    assert "wall recovery / plain start 1.040 [1.040, 1.040], bar 1.1: met" in told


BUSY = """\
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_job_counts_what_its_children_use_and_leaves_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    endless = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"

    def child() -> int:
        if not log.read_text().endswith("\n"):
            raise LookupError("it has not spoken")
        return int(log.read_text())

    with Job([sys.executable, "-c", BUSY, endless], log) as job:
        pid = job.until(child, 60.0)

        def half_a_second() -> None:
            if job.samples[-1][1] < 0.5:
                raise LookupError("not yet")

        job.until(half_a_second, 60.0)
        assert alive(pid) and alive(job.process.pid)
    ends = time.monotonic() + 20
    while alive(pid) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not alive(pid) and not alive(job.process.pid)


def test_a_job_that_ends_too_early_shows_its_log(tmp_path: Path) -> None:
    def never() -> None:
        raise LookupError("no step is complete")

    with (
        Job([sys.executable, "-c", "print('what went wrong')"], tmp_path / "log") as job,
        pytest.raises(RuntimeError, match=r"no step is complete when it left \(0\)") as raised,
    ):
        job.until(never, 60.0)
    assert "what went wrong" in str(raised.value)


def test_arms_are_interleaved_and_the_rank_that_is_killed_changes(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []

    def arm(name: str) -> recovery.Measure:
        def measure(folder: Path, rank: int) -> Measured:
            assert folder.is_dir() and not list(folder.iterdir())
            calls.append((name, rank))
            return Measured({"detect": 1.0}, {"detect": 2.0}, 0)

        return measure

    names = (PLAIN, AGAIN, RECOVERY, LOOP)
    rounds = recovery.interleave({name: arm(name) for name in names}, rounds=4, loop_rounds=2)
    assert [set(measured) for measured in rounds] == [set(names)] * 2 + [set(names[:3])] * 2
    assert [rank for name, rank in calls if name == RECOVERY] == [1, 0, 1, 0]
    orders = [[name for name, _ in calls[4 * n : 4 * n + 4]] for n in range(2)]
    assert orders[0] != orders[1]


def test_the_result_holds_every_run_and_what_it_is_worth_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter(_rounds(5.2, 0.01))
    monkeypatch.setattr(recovery.restarts, "prepare", lambda *_: None)
    monkeypatch.setattr(recovery.restarts, "prepare_loop", lambda *_: None)
    monkeypatch.setattr(
        recovery, "interleave", lambda arms, n, _: [next(given) for _ in range(n if arms else 0)]
    )
    recovery.main(["--rounds", "9", "--out", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["rounds"] == _rounds(5.2, 0.01)
    assert result["wall_s"]["recovery"]["verdict"] == "met"
    assert {"date", "cpu", "load_average", "revision", "command", "flags"} <= set(result)


@pytest.mark.slow
def test_a_real_kill_is_measured(tmp_path: Path) -> None:
    """From nothing, to be short: what only a resumption needs is not compiled beforehand."""
    flags = (*recovery.FLAGS, *recovery.QUICK, "--checkpoint.interval", "2")
    (tmp_path / "run").mkdir()
    folder = tmp_path / "copy"
    found = restarts.recover(Arm(flags), recovery.CONFIG, tmp_path, folder, rank=1)
    assert list(found.wall_s) == list(found.cpu_s) == [p for p in marks.PARTS if p != "launch"]
    assert found.facts == {"killed": 1, "named": ["signal of rank 1"]}
    assert found.compiled <= 2, "on each process, the digest of what was restored"
    assert found.cpu_s["import"] > 0.5, "two processes import JAX"
    (failure,) = report(folder / "run")["failures"][:1]
    told = failure["phases_s"]
    assert found.wall_s["detect"] >= told["detect"] - 0.1, "the leader cannot know before the kill"
    assert found.wall_s["stop"] == pytest.approx(told["stop"], abs=1e-5)
    assert found.wall_s["wait"] == pytest.approx(told["wait"], abs=1e-5)
    assert found.wall_s["first_step"] == pytest.approx(told["first_step"], abs=1e-5)
    for part in ("join", "restore", "compile"):  # of the slower process there
        assert found.wall_s[part] <= told[part] + 1e-5
    records = read(folder / "run").records
    launched = records[0].time_us / 1e6
    cold = marks.durations(marks.of_start(records, 1, launched))["compile"]
    assert cold > found.wall_s["compile"] > 0
