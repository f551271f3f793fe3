"""The report of a run for a person at a terminal, or in a file."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxrel.ledger.accounting import Accounting, Span
from jaxrel.ledger.failures import PARTS
from jaxrel.ledger.summary import Summary

MARKS = {
    "effective": ("=", "green"),
    "start": ("s", "cyan"),
    "join": ("j", "cyan"),
    "restore": ("r", "cyan"),
    "compile": ("c", "blue"),
    "rework": ("x", "red"),
    "checkpoint": ("k", "magenta"),
    "data": ("d", "magenta"),
    "evaluation": ("e", "magenta"),
    "checks": ("h", "magenta"),
    "triage": ("t", "magenta"),
    "detection": ("!", "bold red"),
    "stop": (".", "yellow"),
    "restart_wait": ("w", "yellow"),
    "idle": (" ", ""),
    "unknown": ("?", "dim"),
}
"""Letter and colour of each category in the timeline."""
FAILED = ("X", "bold white on red")
"""Where a failure happened."""
_SHOWN = 20
"""Attempts and failures; of more, the latest."""


def show(summary: Summary, console: Console, now_s: float) -> None:
    """Print the report of a run; `now_s` is seconds since the epoch."""
    document = _printable(summary.document, console.encoding)
    for part in (
        _verdict(document, now_s),
        _where_time_went(document),
        *_timeline(document, summary.accounting, console.width),
        *_failures(document["failures"]),
        Text("\n".join(_last_lines(document))),
    ):
        console.print(part)
        console.print()


def _verdict(document: dict[str, Any], now_s: float) -> Text:
    """The one line that matters most."""
    words, colour = {
        "finished": ("finished", "green"),
        "failed": ("failed", "red"),
        "stopped": ("stopped, to go on later", "yellow"),
        "open": ("running, or ended without a word", "yellow"),
    }[document["status"]]
    steps = "no step complete" if document["steps"] is None else f"step {document['steps']}"
    line = Text.assemble((words, f"bold {colour}"), f": {steps}")
    line.append(f"; effective training time {_share(document['effective_training_time'])}")
    line.append(f" of {_seconds(document['wall_s'])}")
    if document["status"] == "open":
        line.append(f"; last record {_seconds(max(0.0, now_s - document['last_record']))} ago")
    return line.append(f"; {document['reason']}") if document["reason"] else line


def _where_time_went(document: dict[str, Any]) -> Table:
    table = _table("where the time went", "seconds>", "share>")
    times = {"effective": document["effective_s"]} | document["badput_s"]
    for name, seconds in sorted(times.items(), key=lambda item: -item[1]):
        if seconds:
            _add_row(table, name, f"{seconds:.3f}", _share(seconds / document["wall_s"]))
    _add_row(table, "wall", f"{document['wall_s']:.3f}", "")
    return table


def _timeline(document: dict[str, Any], accounting: Accounting, width: int) -> Iterable[Text]:
    """One bar an attempt along the wall time, and what its letters mean."""
    attempts = document["attempts"][-_SHOWN:]
    if not attempts or not accounting.wall_us:
        return
    labels = [_label(entry) for entry in attempts]
    room = max(map(len, labels)) + 2
    columns = max(10, width - room - 1)
    bars = _bars(accounting, columns)
    for mark in _fault_columns(document, accounting, columns):
        if mark in bars:
            bars[mark] = "failure"
    lines, used = [], set()
    for entry, label in zip(attempts, labels, strict=True):
        line = Text(label.ljust(room))
        for column in range(columns):
            kind = bars.get((entry["id"], column), "idle")
            used.add(kind)
            line.append(*(FAILED if kind == "failure" else MARKS[kind]))
        lines.append(line)
    if len(document["attempts"]) > _SHOWN:
        lines.insert(0, Text(f"({len(document['attempts']) - _SHOWN} earlier attempts)"))
    legend = [f"{MARKS[kind][0]}\0{kind}" for kind in MARKS if kind in used and kind != "idle"]
    legend += [f"{FAILED[0]}\0failure"] if "failure" in used else []
    meanings = textwrap.fill("  ".join(legend), width).replace("\0", " ")
    yield Text("\n").join([*lines, Text(meanings)])


def _label(entry: dict[str, Any]) -> str:
    devices = entry["devices"]
    return f"attempt {entry['id']}" + ("" if devices is None else f" on {devices}")


def _bars(accounting: Accounting, columns: int) -> dict[tuple[int, int], str]:
    """What each attempt was mostly at, by attempt and column."""
    shares: dict[tuple[int, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for span in accounting.spans:
        first, last = (_column(t, accounting, columns) for t in (span.start_us, span.end_us - 1))
        for column in range(first, last + 1):
            shares[span.attempt, column][span.category] += _overlap(
                span, accounting, columns, column
            )
    return {place: max(times, key=lambda kind: times[kind]) for place, times in shares.items()}


def _column(time_us: int, accounting: Accounting, columns: int) -> int:
    since = time_us - accounting.start_us
    return max(0, min(columns - 1, since * columns // accounting.wall_us))


def _overlap(span: Span, accounting: Accounting, columns: int, column: int) -> int:
    """Time of `span` within `column`, in microseconds times `columns`."""
    start, end = ((t - accounting.start_us) * columns for t in (span.start_us, span.end_us))
    left = column * accounting.wall_us
    return min(end, left + accounting.wall_us) - max(start, left)


def _fault_columns(
    document: dict[str, Any], accounting: Accounting, columns: int
) -> Iterable[tuple[int, int]]:
    """Attempt and column of each failure: where its time of detection begins."""
    for failure in document["failures"]:
        own = [span for span in accounting.spans if span.attempt == failure["attempt"]]
        found = [span for span in own if span.category in ("detection", "stop")] or own[-1:]
        for span in found[:1]:
            yield failure["attempt"], _column(span.start_us, accounting, columns)


def _failures(failures: Sequence[dict[str, Any]]) -> Iterable[Table | Text]:
    """Who failed, and what each recovery took."""
    if not failures:
        return
    who = _table("failed", "kind", "rank>", "host", "step>", "steps lost>", "recovered after>")
    how = _table("recovery", *(f"{part}>" for part in PARTS))
    details = []
    for failure in failures[-_SHOWN:]:
        attempt = f"attempt {failure['attempt']}"
        places = (_known(failure[name]) for name in ("rank", "host", "step", "steps_lost"))
        _add_row(who, attempt, failure["kind"], *places, _seconds(failure["recovered_after_s"]))
        _add_row(how, attempt, *(_seconds(failure["phases_s"][part], "-") for part in PARTS))
        others = failure["following"]
        note = f" (following: {', '.join(map(str, others))})" if others else ""
        details.append(f"attempt {failure['attempt']}: {failure['detail']}{note}")
    if len(failures) > _SHOWN:
        details.insert(0, f"({len(failures) - _SHOWN} earlier failures)")
    yield from (who, how, Text("\n".join(details)))


def _last_lines(document: dict[str, Any]) -> Iterable[str]:
    """What the run has to show, and what is missing of its record."""
    if document["evaluations"]:
        last = document["evaluations"][-1]
        count = len(document["evaluations"])
        yield f"held-out loss {_known(last['loss'])} at step {last['step']} ({count} evaluated)"
    if document["checkpoints"]:
        last = document["checkpoints"][-1]
        yield f"last checkpoint: step {last['step']}, state digest {last['state_digest']}"
    if document["final_state_digest"]:
        yield f"final state digest: {document['final_state_digest']}"
    damage = document["damage"]
    for sink, count in damage["lost"].items():
        yield f"{count} records of {sink} were lost"
    if damage["damaged"] or damage["torn"]:
        yield f"ledger: {damage['damaged']} damaged lines, {damage['torn']} cut short"
    for line in damage["lines"]:
        yield f"  {line['file']}, line {line['line']}: {line['error']}"
    yield f"({document['definition']})"


def _table(*headings: str) -> Table:
    """A table without lines; a heading that ends in `>` is of a column of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for heading in headings:
        number = heading.endswith(">")
        table.add_column(heading.rstrip(">"), justify="right" if number else "left")
    return table


def _add_row(table: Table, *cells: str) -> None:
    table.add_row(*map(Text, cells))  # a str would be read as markup


def _known(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _seconds(value: float | None, unknown: str = "unknown") -> str:
    """Short enough for a table, at any size."""
    if value is None:
        return unknown
    if value < 100:
        return f"{value:.2f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m" if hours else f"{minutes} m {seconds:02d} s"


def _printable(value: Any, encoding: str) -> Any:
    """Names from files, without what would move the cursor or cannot be written."""
    if isinstance(value, str):
        text = "".join(c if c.isprintable() else "?" for c in " ".join(value.split()))
        return text.encode(encoding, "replace").decode(encoding, "replace")
    if isinstance(value, dict):
        return {_printable(name, encoding): _printable(x, encoding) for name, x in value.items()}
    return [_printable(x, encoding) for x in value] if isinstance(value, list) else value
