"""What failed in a run, and what each recovery took, part by part."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

from jaxrel.events import (
    AttemptStarted,
    FailureDetected,
    GangDead,
    PhaseBegan,
    Record,
    Resumed,
    StepCompleted,
    WorkerStarted,
)
from jaxrel.ledger.lineage import LEADER, RANK0, current

PARTS = ("detect", "stop", "wait", "start", "join", "restore", "compile", "first_step")
"""Of a recovery. The worker's phases are those of the slowest rank of each, so they may sum to
more than the whole."""


def failures(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The failures of the report; an attempt fails once, whatever is recorded of it later."""
    attempts = _by_attempt(records)
    steps = [
        (record.time_us, record.attempt, record.event.step)
        for record in (records[place] for place in current(records))
        if isinstance(record.event, StepCompleted)
    ]
    best = list(accumulate((step for *_, step in steps), max))
    found = []
    for number, own in sorted(attempts.items()):
        failed = _first(own, FailureDetected, LEADER)
        if failed is not None:
            before = bisect_right(steps, (failed.time_us, math.inf))
            known = best[before - 1] if before else -math.inf
            after = islice(steps, before, None)
            newer = next((time for time, n, step in after if n > number and step > known), None)
            later = [attempts[n] for n in sorted(attempts) if n > number]
            found.append(_failure(failed, own, later, newer))
    return found


def _failure(
    failed: Record, own: list[Record], later: list[list[Record]], newer_us: int | None
) -> dict[str, Any]:
    """One entry; `newer_us` is when a step was complete that was newer than any before."""
    event = failed.event
    assert isinstance(event, FailureDetected)
    recovered = None
    if newer_us is not None and event.after_s is not None:
        recovered = round(_seconds(newer_us - failed.time_us) + max(0.0, event.after_s), 6)
    return {
        "kind": event.kind,
        "rank": event.rank,
        "host": event.host,
        "detail": event.detail,
        "step": event.step,
        "following": event.following,
        "attempt": failed.attempt,
        "detected_after_s": event.after_s,
        "recovered_after_s": recovered,
        "phases_s": _parts(failed, event.after_s, own, later[0] if later else []),
        "steps_lost": _steps_lost(failed, own, later),
    }


def _parts(
    failed: Record, after_s: float | None, own: list[Record], following: list[Record]
) -> dict[str, float | None]:
    """Seconds of each part of the recovery that the next attempt was; None is unknown."""
    dead = _first(own, GangDead, LEADER)
    started = _first(following, AttemptStarted, LEADER)
    parts: dict[str, float | None] = dict.fromkeys(PARTS)
    parts["detect"] = after_s
    parts["stop"] = _between(failed, dead)
    parts["wait"] = _between(dead, started)
    ranks = defaultdict(list)
    for record in following:
        if isinstance(record.event, PhaseBegan):
            ranks[record.source].append((record.event.phase, record.time_us))
    for phases in ranks.values():
        if started is not None:
            phases.insert(0, ("start", started.time_us))
        for part, seconds in _durations(phases).items():
            parts[part] = max(seconds, parts[part] or 0.0)
    train = [r for r in following if r.source == RANK0 and r.event == PhaseBegan("train")]
    step = _first(following, StepCompleted, RANK0)
    parts["first_step"] = _between(train[0], step) if train else None
    return parts


def _durations(phases: list[tuple[str, int]]) -> dict[str, float]:
    """Seconds that a rank spent in each phase before it trained, of those that it left."""
    durations: dict[str, float] = {}
    for (phase, begun), (_, ended) in pairwise(phases):
        if phase == "train":
            break
        if phase in ("start", "join", "restore", "compile"):
            durations[phase] = durations.get(phase, 0.0) + _seconds(ended - begun)
    return durations


def _steps_lost(failed: Record, own: list[Record], later: list[list[Record]]) -> int | None:
    """Completed steps that the next resumption did not have; None while there is none."""
    resumed = [_first(records, Resumed, RANK0) for records in later]
    steps = [r.event.step for r in resumed if r is not None and isinstance(r.event, Resumed)]
    if not steps:
        return None
    before = [r for r in own if r.source == RANK0 and r.time_us <= failed.time_us]
    done = [r.event.step for r in before if isinstance(r.event, StepCompleted | Resumed)]
    return max(0, done[-1] - steps[0]) if done else 0


def _by_attempt(records: Sequence[Record]) -> dict[int, list[Record]]:
    attempts: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        attempts[record.attempt].append(record)
    began = AttemptStarted | WorkerStarted | PhaseBegan | Resumed | StepCompleted
    return {n: own for n, own in attempts.items() if any(isinstance(r.event, began) for r in own)}


def _first(records: Sequence[Record], kind: Any, source: str) -> Record | None:
    return next((r for r in records if r.source == source and isinstance(r.event, kind)), None)


def _between(begun: Record | None, ended: Record | None) -> float | None:
    if begun is None or ended is None:
        return None
    return _seconds(ended.time_us - begun.time_us)


def _seconds(microseconds: int) -> float:
    """Of two clocks: never less than none."""
    return round(max(0, microseconds) / 1e6, 6)
