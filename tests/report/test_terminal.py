import io
from dataclasses import replace

import pytest
from rich.console import Console

from jaxrel.events import (
    Evaluated,
    FailureDetected,
    Finished,
    GangDead,
    Record,
    RecordsLost,
    WorkerFailed,
)
from jaxrel.ledger.reader import Damage, Journal
from jaxrel.ledger.summary import summarize
from jaxrel.report.terminal import show
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
)


def shown(
    records: list[Record], width: int = 80, now: float = 0, encoding: str = "utf-8", **journal: int
) -> list[str]:
    """The lines of the report as they come out of a pipe."""
    given = Journal(records, 1, 0, [])
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(summarize(replace(given, **journal)), Console(file=file, width=width), now)
    file.seek(0)
    return [line.rstrip() for line in file.read().splitlines()]


RUN = [
    spawned(0, 1),
    started(0, 1),
    phase(10, 1, "compile"),
    resumed(20, 1, 0),
    phase(20, 1, "train"),
    step(30, 1, 1),
    step(40, 1, 2),
    failed(60, 1, 10.0, step=2, following=[0]),
    lead(65, 1, GangDead()),
    spawned(70, 2),
    started(70, 2),
    phase(75, 2, "restore"),
    resumed(80, 2, 1),
    phase(80, 2, "train"),
    step(100, 2, 2),
    evaluated(105, 2, 2, 5.0, loss=1.25),
    saved(105, 2, 2, 1.0, digest="cafe"),
    at(110, 2, Finished(2, "cafe")),
]


@pytest.mark.core
def test_the_verdict_comes_first() -> None:
    # Steps 1 (10 s) and 2 of the second attempt (20 s) of 110 s.
    assert shown(RUN)[0] == "finished: step 2; effective training time 27.3% of 1 m 50 s"
    verdicts = {
        "failed: step 2; effective training time 27.3% of 1 m 50 s; E: x [y]": at(
            110, 2, WorkerFailed("E: x [y]", 70)
        ),
        "stopped, to go on later: step 2; effective training time 27.3% of 1 m 50 s; asked": at(
            110, 2, WorkerFailed("asked", 75)
        ),
    }
    unled = [record for record in RUN[:-1] if record.source != "leader"]
    for verdict, last in verdicts.items():
        assert verdict.split(";")[0] == shown([*unled, last], width=200)[0].split(";")[0]
        assert verdict.split(";")[-1] == shown([*unled, last], width=200)[0].split(";")[-1]


def test_an_open_run_says_when_it_was_last_heard_of() -> None:
    first = shown(RUN[:7], width=120, now=52.5)[0]
    assert first == (
        "running, or ended without a word: step 2; effective training time 50.0% of 40.00 s;"
        " last record 12.50 s ago"
    )
    assert shown([])[0].startswith("running, or ended without a word: no step complete;")


@pytest.mark.core
def test_where_the_time_went_largest_first_and_nothing_that_took_none() -> None:
    lines = shown(RUN)
    table = lines[2 : lines.index("", 2)]
    assert [line.split() for line in table] == [
        ["where", "the", "time", "went", "seconds", "share"],
        ["effective", "30.000", "27.3%"],
        ["rework", "20.000", "18.2%"],  # step 2 of the first attempt, and 40 .. 50
        ["start", "15.000", "13.6%"],
        ["compile", "10.000", "9.1%"],
        ["detection", "10.000", "9.1%"],
        ["stop", "9.000", "8.2%"],
        ["restore", "5.000", "4.5%"],
        ["evaluation", "5.000", "4.5%"],
        ["restart_wait", "5.000", "4.5%"],
        ["checkpoint", "1.000", "0.9%"],
        ["wall", "110.000"],
    ]


@pytest.mark.core
def test_the_timeline_has_a_bar_an_attempt_and_marks_the_failure() -> None:
    # 16 columns of label, then 110 of one second each.
    lines = shown(RUN, width=16 + 110 + 1)
    bars = [line for line in lines if line.startswith("attempt") and " on 8  " in line]
    first = "s" * 10 + "c" * 10 + "=" * 10 + "x" * 20 + "X" + "!" * 9 + "." * 5 + "w" * 5
    second = " " * 70 + "s" * 5 + "r" * 5 + "=" * 20 + "k" + "e" * 5 + "." * 4
    assert bars == [f"attempt 1 on 8  {first}", f"attempt 2 on 8  {second}"]
    legend = " ".join(lines[lines.index(bars[1]) + 1 : lines.index(bars[1]) + 3])
    assert legend.startswith("= effective  s start  r restore  c compile  x rework")
    assert legend.endswith("w restart_wait X failure")
    assert "join" not in legend


def test_a_column_shows_what_took_most_of_it() -> None:
    lines = shown(RUN, width=16 + 11 + 1)  # of ten seconds each
    bars = [line for line in lines if line.startswith("attempt") and " on 8  " in line]
    assert bars[0] == "attempt 1 on 8  sc=xxX."
    assert bars[1] in ("attempt 2 on 8         s==e", "attempt 2 on 8         r==e")


@pytest.mark.core
def test_failures_and_what_each_recovery_took() -> None:
    lines = shown([*RUN[:-3], step(101, 2, 3)], width=100)
    rows = [line.split() for line in lines]
    head = rows.index([*"failed kind rank host step steps lost recovered after".split()])
    assert rows[head + 1] == "attempt 1 signal 1 host1 2 1 51.00 s".split()
    head = rows.index([*"recovery detect stop wait start join restore compile first_step".split()])
    assert rows[head + 1] == [*"attempt 1 10.00 s 5.00 s 5.00 s 5.00 s - 5.00 s - 20.00 s".split()]
    assert "attempt 1: killed by SIGKILL (following: 0)" in lines


def test_what_is_not_known_says_so() -> None:
    lines = shown([*RUN[:7], failed(60, 1, None)])
    assert any(line.split()[-2:] == ["unknown", "unknown"] for line in lines if "signal" in line)


def test_what_the_run_has_to_show() -> None:
    lines = shown([*RUN[:6], at(35, 1, Evaluated(1, None, 9, 1.0)), *RUN[6:]])
    assert "held-out loss 1.2500 at step 2 (2 evaluated)" in lines
    assert "last checkpoint: step 2, state digest cafe" in lines
    assert "final state digest: cafe" in lines
    lines = shown([*RUN[:7], at(41, 1, Evaluated(2, None, 9, 1.0))])
    assert "held-out loss unknown at step 2 (1 evaluated)" in lines


def test_what_is_missing_of_the_record() -> None:
    damaged = [Damage("a.jsonl", 7, "no [record]")]
    lost = at(41, 1, RecordsLost("tensorboard", 5, "full"))
    file = io.StringIO()
    journal = Journal([*RUN[:7], lost], 2, 1, damaged)
    show(summarize(journal), Console(file=file, width=80), 0)
    text = file.getvalue()
    assert "5 records of tensorboard were lost" in text
    assert "ledger: 1 damaged lines, 1 cut short" in text
    assert "a.jsonl, line 7: no [record]" in text


@pytest.mark.core
def test_names_from_the_ledger_are_never_markup_nor_move_the_cursor() -> None:
    host, detail = "[red]h:smile:", "[bold]x[/bold]\x1b[31m\ud800 [/nope]\nsecond"
    event = FailureDetected("signal", 1, host, detail, 1.0)
    lines = shown([*RUN[:7], lead(60, 1, event)], width=120)
    assert any(host in line for line in lines)
    assert "attempt 1: [bold]x[/bold]?[31m? [/nope] second" in lines
    assert "\x1b" not in "".join(lines)


def test_a_terminal_that_knows_ascii_alone_is_served() -> None:
    event = FailureDetected("signal", 1, "höst", "größer", 1.0)
    lines = shown([*RUN[:7], lead(60, 1, event)], width=120, encoding="ascii")
    assert "attempt 1: gr??er" in lines


@pytest.mark.parametrize("width", [40, 80])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    lines = shown(RUN, width=width)
    assert max(map(len, lines)) <= width
    if width == 80:  # and all of the failures' columns are there
        assert any("steps lost" in line and "recovered after" in line for line in lines)
        assert any("first_step" in line and "detect" in line for line in lines)


def test_of_many_attempts_and_failures_the_latest_are_shown() -> None:
    records: list[Record] = []
    for n in range(1, 31):
        start = 10 * n
        records += [spawned(start, n), started(start, n), failed(start + 5, n, 1.0)]
    lines = shown(records)
    assert "(10 earlier attempts)" in lines
    assert "(10 earlier failures)" in lines
    assert not any(line.startswith("attempt 10 ") for line in lines)
    assert any(line.startswith("attempt 30 ") for line in lines)


def test_colours_are_for_terminals() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard")
    show(summarize(Journal(RUN, 1, 0, [])), console, 0)
    assert "\x1b[32m" in file.getvalue()
