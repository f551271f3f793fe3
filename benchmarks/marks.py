"""A start or a recovery, split into parts by the marks that its processes left.

A mark is the name of the part that begins and the moment, in seconds since the epoch; the
last one is `END`. Parts are of one chain, that of rank 0, so they sum to the whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from jaxrel.events import (
    AttemptStarted,
    FailureDetected,
    GangDead,
    PhaseBegan,
    Record,
    StepCompleted,
)

Mark = tuple[str, float]
END = "end"

PARTS = {
    "launch": "the launcher and its agents start",
    "detect": "the kill, until the job knows of it",
    "stop": "until no process is left",
    "wait": "until the next attempt",
    "import": "spawn, interpreter and imports",
    "start": "the process's own checks",
    "join": "the processes meet, the devices come up, the step is made",
    "restore": "the checkpoint is read and verified",
    "compile": "tracing, lowering, and the program from the cache",
    "first_step": "until the first step is complete",
    "rework": "until a step is complete that is newer than any before the kill",
}
"""All parts, in order, and what each is."""
REWORK = "rework"
"""The part that is no part of a recovery: how much of it there is was decided by the last save."""


def of_start(records: Iterable[Record], attempt: int, launched: float) -> list[Mark]:
    """Marks of a job that was launched at `launched`, up to the first step of `attempt`.

    Raises LookupError where the ledger has no such mark yet.
    """
    own = [record for record in records if record.attempt == attempt]
    return [("launch", launched), *_of_workers(own), (END, _steps(own)[0][1])]


def of_recovery(records: Iterable[Record], attempt: int, killed: float) -> list[Mark]:
    """Marks from the kill at `killed` in `attempt` to the first new step of the attempt after it.

    Raises LookupError where the ledger has no such mark yet.
    """
    records = list(records)
    failed = [record for record in records if record.attempt == attempt]
    following = [record for record in records if record.attempt == attempt + 1]
    newest = max(step for step, _ in _steps(failed))
    again = _steps(following)
    new = [at for step, at in again if step > newest]
    if not new:
        raise LookupError(f"no step after {newest}")
    return [
        ("detect", killed),
        ("stop", _at(failed, "leader", FailureDetected)),
        ("wait", _at(failed, "leader", GangDead)),
        *_of_workers(following),
        (REWORK, again[0][1]),
        (END, new[0]),
    ]


def of_loop(lines: Iterable[str], killed: float) -> list[Mark]:
    """Marks of the baseline from its `TIME NAME` lines: `of_recovery`, but nobody says what
    went on before both processes were started again, so that is all `detect`.

    Raises LookupError where there is no such mark yet.
    """
    told = sorted((float(at), name) for at, name in (line.split(maxsplit=1) for line in lines))
    spawned = max((n for n, (_, name) in enumerate(told) if name == "import"), default=0)
    if not told or told[spawned][0] < killed:
        raise LookupError("not started again")
    newest = max((step for step, _ in _told_steps(told[:spawned])), default=0)
    again = _told_steps(told[spawned:])
    new = [at for step, at in again if step > newest]
    if not new:
        raise LookupError(f"no step after {newest}")
    parts = [(name, at) for at, name in told[spawned:] if name in PARTS]
    return [("detect", killed), *parts, (REWORK, again[0][1]), (END, new[0])]


def durations(marks: Sequence[Mark]) -> dict[str, float]:
    """Seconds of each part. Raises ValueError when a clock stepped back between two marks."""
    parts = {}
    for (part, begun), (following, ended) in pairwise(marks):
        if ended < begun:
            raise ValueError(f"{following} is marked {begun - ended:g} s before {part}")
        parts[part] = ended - begun
    return parts


def cpu_of_parts(marks: Sequence[Mark], samples: Sequence[tuple[float, float]]) -> dict[str, float]:
    """CPU seconds of each part, from samples of (moment, CPU seconds used until then)."""
    times, used = zip(*samples, strict=True)
    at = np.interp([moment for _, moment in marks], times, used)
    return {part: float(used) for (part, _), used in zip(marks[:-1], np.diff(at), strict=True)}


def whole(parts: Mapping[str, float]) -> float:
    """Seconds of a start or a recovery: all parts but the steps that are done twice."""
    return sum(seconds for part, seconds in parts.items() if part != REWORK)


def _of_workers(own: Sequence[Record]) -> list[Mark]:
    """From the spawn to the first step, by rank 0's phases."""
    phases = [(name, name) for name in ("start", "join", "restore", "compile")]
    return [
        ("import", _at(own, "leader", AttemptStarted)),
        *(
            (part, _at(own, "rank0", PhaseBegan, p))
            for part, p in [*phases, ("first_step", "train")]
        ),
    ]


def _told_steps(told: Iterable[tuple[float, str]]) -> list[tuple[int, float]]:
    return [(int(name.split()[1]), at) for at, name in told if name.startswith("step ")]


def _steps(records: Iterable[Record]) -> list[tuple[int, float]]:
    """(step, moment) of the completed steps. Raises LookupError where there is none."""
    found = [(r.event.step, r.time_us / 1e6) for r in records if isinstance(r.event, StepCompleted)]
    if not found:
        raise LookupError("no step is complete")
    return found


def _at(records: Iterable[Record], source: str, kind: type, phase: str | None = None) -> float:
    """When `source` first recorded an event of `kind`."""
    for record in records:
        wanted = phase is None or getattr(record.event, "phase", None) == phase
        if record.source == source and isinstance(record.event, kind) and wanted:
            return record.time_us / 1e6
    raise LookupError(f"{source} has recorded no {kind.__name__} {phase or ''}")
