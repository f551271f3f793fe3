"""The report of a run, from its ledger: the document of `jaxrel report --json`."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxrel.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    Evaluated,
    FailureDetected,
    Finished,
    JobEnded,
    JobStarted,
    Record,
    RecordsLost,
    Resumed,
    StepCompleted,
    Unknown,
    WorkerFailed,
    WorkerStarted,
)
from jaxrel.exit_codes import ExitCode
from jaxrel.ledger.accounting import DEFINITION, Accounting, account
from jaxrel.ledger.failures import failures
from jaxrel.ledger.lineage import LEADER, RANK0, Lineage, current
from jaxrel.ledger.reader import Journal, read

_SHOWN = 20
"""Damaged lines that the report names; it counts all."""


@dataclass(frozen=True)
class Summary:
    """A report, and the timeline that a picture of it needs."""

    document: dict[str, Any]
    accounting: Accounting


def report(run_dir: str | Path) -> dict[str, Any]:
    """What happened in a run, as one JSON document.

    Seconds are exact to the microsecond: `effective_s` and all of `badput_s` sum to `wall_s`.
    What is not known is None. Raises what `reader.read` raises.
    """
    return summarize(read(run_dir)).document


def summarize(journal: Journal) -> Summary:
    """The report of what was read."""
    records = journal.records
    accounting = account(records)
    lineage = Lineage(records)
    places = current(records)
    own = [records[place] for place in places]
    kept = [
        record.event
        for place, record in zip(places, own, strict=True)
        if lineage.keeps(place, record.attempt, getattr(record.event, "step", 0))
    ]
    status, reason = _status(records, set(places))
    steps = (e.step for e in kept if isinstance(e, StepCompleted | Resumed | Finished))
    saved = {e.step: e for e in kept if isinstance(e, CheckpointSaved)}
    evaluated = {e.step: e for e in kept if isinstance(e, Evaluated)}
    document = {
        "status": status,
        "reason": reason,
        "started": _seconds(accounting.start_us),
        "last_record": _seconds(accounting.start_us + accounting.wall_us),
        "wall_s": _seconds(accounting.wall_us),
        "effective_s": _seconds(accounting.effective_us),
        "effective_training_time": (
            accounting.effective_us / accounting.wall_us if accounting.wall_us else None
        ),
        "badput_s": {name: _seconds(us) for name, us in accounting.badput_us.items()},
        "attempts": _attempts(records, own),
        "failures": failures(records),
        "steps": max(steps, default=None),
        "final_state_digest": _final_digest(status, kept),
        "skipped": [],
        "verdicts": [],
        "evaluations": [
            {"step": e.step, "loss": e.loss, "rows": e.rows, "seconds": e.seconds}
            for _, e in sorted(evaluated.items())
        ],
        "checkpoints": [
            {
                "step": e.step,
                "seconds": e.seconds,
                "blocking_s": e.blocking_s,
                "state_digest": e.state_digest,
            }
            for _, e in sorted(saved.items())
        ],
        "damage": _damage(journal),
        "definition": DEFINITION,
    }
    return Summary(_finite(document), accounting)


def _status(records: Sequence[Record], own: set[int]) -> tuple[str, str]:
    """How the run stands, and why: the last word of its leader, or of rank 0 without one.

    `finished`, `failed`, `stopped` (in order, to go on later) or `open`: it is running, or it
    ended without a word. `own` are the places of rank 0's records that count.
    """
    led = {record.attempt for record in records if record.source == LEADER}
    status, reason = "open", ""
    for place, record in enumerate(records):
        if record.source != LEADER and place not in own:
            continue
        match record.event:
            case JobEnded(exit=code, reason=why):
                status, reason = _of_exit(code), why or f"exit {code}"
            case WorkerFailed(exit=code, error=why) if record.attempt not in led:
                status, reason = _of_exit(code), why
            case Finished():
                status, reason = "finished", ""
            case (
                JobStarted() | AttemptStarted() | FailureDetected() | WorkerStarted() | Resumed()
                | StepCompleted()
            ):  # fmt: skip
                status, reason = "open", ""
    return status, "" if status == "finished" else reason


def _of_exit(code: int) -> str:
    if code == ExitCode.OK:
        return "finished"
    return "stopped" if code == ExitCode.PREEMPTED else "failed"


def _final_digest(status: str, kept: Sequence[Any]) -> str | None:
    """Of the last step's checkpoint, once the run is finished."""
    if status != "finished":
        return None
    digests = [e.state_digest for e in kept if isinstance(e, Finished)]
    return digests[-1] if digests else None


def _attempts(records: Sequence[Record], own: Sequence[Record]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        if record.attempt < 1 or record.source not in (LEADER, RANK0):
            continue
        entry = found.setdefault(
            record.attempt,
            {
                "id": record.attempt,
                "resumed_from": None,
                "devices": None,
                "processes": None,
                "exit": None,
                "started": _seconds(record.time_us),
                "steps": 0,
            },
        )
        match record.event:
            case AttemptStarted(hosts=hosts):
                entry["processes"] = len(hosts)
            case WorkerStarted(processes=processes):
                entry["processes"] = processes
            case Resumed() as event if entry["resumed_from"] is None:
                entry["resumed_from"] = event.step
                entry["devices"], entry["processes"] = event.devices, event.processes
            case AttemptEnded(exit=code) | WorkerFailed(exit=code):  # the leader's word is later
                entry["exit"] = code
            case Finished() if entry["exit"] is None:
                entry["exit"] = 0
    steps = {(r.attempt, r.event.step) for r in own if isinstance(r.event, StepCompleted)}
    for attempt, count in Counter(attempt for attempt, _ in steps).items():
        if attempt in found:
            found[attempt]["steps"] = count
    return [entry for _, entry in sorted(found.items())]


def _damage(journal: Journal) -> dict[str, Any]:
    """What of the ledger is missing or cannot be understood."""
    lost: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for record in journal.records:
        if isinstance(record.event, RecordsLost):
            lost[record.event.sink] += record.event.count
        elif isinstance(record.event, Unknown):
            unknown[record.event.name] += 1
    return {
        "torn": journal.torn,
        "damaged": len(journal.damaged),
        "lines": [asdict(damage) for damage in journal.damaged[:_SHOWN]],
        "lost": dict(lost),
        "unknown": dict(unknown),
    }


def _seconds(microseconds: int) -> float:
    return round(microseconds / 1e6, 6)


def _finite(value: Any) -> Any:
    """As JSON can hold it: a number that is not finite is not known."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    return [_finite(x) for x in value] if isinstance(value, list) else value
