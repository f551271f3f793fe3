"""Read a run's ledger, whatever state it is in.

A record that was cut short at the end of a segment is normal: its writer was killed, or is
at it right now. Any other line that is no record is damage. Both are counted, never fatal.
"""

import heapq
import json
import os
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxrel.events import VERSION, Record, from_json
from jaxrel.exit_codes import DataRefusedError, UsageError

DIRECTORY = "ledger"
"""Of the segments, inside the run directory."""
SUFFIX = ".jsonl"
_MOST = 2**63 - 1
_NAME = re.compile(rf"(\d+)-\w+-\w+{re.escape(SUFFIX)}")


@dataclass(frozen=True)
class Damage:
    """A line that is no record, or (line 0) a segment that cannot be read."""

    file: str
    line: int
    error: str


@dataclass(frozen=True)
class Journal:
    """All that a ledger holds."""

    records: list[Record]
    """By time; those of one segment in the order in which they were written."""
    segments: int
    torn: int
    """Segments whose last record was cut short."""
    damaged: list[Damage]


def segment_name(attempt: int, source: str, unique: str) -> str:
    """The file name of a segment: its attempt can be read off it."""
    return f"{attempt:06d}-{source}-{unique}{SUFFIX}"


def segments(run_dir: str | Path) -> list[Path]:
    """The segments of a run, by name; [] where there are none."""
    return sorted(Path(run_dir, DIRECTORY).glob(f"*{SUFFIX}"))


def highest_attempt(run_dir: str | Path) -> int:
    """The highest attempt that a segment was opened for; 0 in a new run."""
    names = [_NAME.fullmatch(path.name) for path in segments(run_dir)]
    return max((int(name[1]) for name in names if name), default=0)


def read(run_dir: str | Path) -> Journal:
    """The ledger of a run.

    Raises UsageError when `run_dir` is no run directory or holds no ledger, DataRefusedError
    when a later version of jaxrel wrote it.
    """
    if not os.path.isdir(run_dir):  # also of a name that is too long
        raise UsageError(f"RUN: got {str(run_dir)!r}: expected the directory of a run")
    paths = segments(run_dir)
    if not paths:
        raise UsageError(f"RUN: got {str(run_dir)!r}: it has no ledger: no run was recorded here")
    parts = [_Segment(path) for path in paths]
    records = list(heapq.merge(*parts, key=lambda record: record.time_us))
    damaged = [damage for part in parts for damage in part.damaged]
    return Journal(records, len(parts), sum(part.torn for part in parts), damaged)


class _Segment:
    """Iterates over the records of a segment, and counts what is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = 0
        self.damaged: list[Damage] = []

    def __iter__(self) -> Iterator[Record]:
        number = 0
        try:
            with self.path.open("rb") as file:
                latest = None
                for number, line in enumerate(file, 1):
                    record = self._record(number, line)
                    if record is None:
                        continue
                    # A segment's order is certain and its times are not, so they give way.
                    if latest is not None and record.time_us < latest:
                        record = replace(record, time_us=latest)
                    latest = record.time_us
                    yield record
        except OSError as error:
            self.damaged.append(Damage(self.path.name, number and number + 1, str(error)))

    def _record(self, number: int, line: bytes) -> Record | None:
        if not line.strip():
            return None
        try:
            document = json.loads(line.decode())
            if isinstance(document, dict):
                self._check_version(number, document.get("v"))
            return _checked(from_json(document))
        except (ValueError, RecursionError) as error:
            if line.endswith(b"\n"):
                self.damaged.append(Damage(self.path.name, number, str(error)))
            else:
                self.torn += 1
            return None

    def _check_version(self, number: int, version: Any) -> None:
        if type(version) is int and version > VERSION:
            raise DataRefusedError(
                f"{DIRECTORY}/{self.path.name}, line {number}: got version {version}: this jaxrel"
                f" reads up to version {VERSION}; read it with the one that wrote it"
            )


def _checked(record: Record) -> Record:
    """The record, if each of its fields is of its type; else ValueError.

    JSON has no NaN: null in a field that must be a number stands for one that is not finite.
    No number needs more than 63 bits.
    """
    event, missing = record.event, []
    if not 0 <= record.time_us <= _MOST or not 0 <= record.attempt <= _MOST:
        raise ValueError(f"time {record.time_us}, attempt {record.attempt}: out of range")
    for name, kinds, number in _field_kinds(type(event)):
        value = getattr(event, name)
        if value is None and number:
            missing.append(name)
        elif type(value) not in kinds or (type(value) is int and abs(value) > _MOST):
            raise ValueError(f"{type(event).__name__}.{name}: got {str(value)[:40]!r}")
    if missing:
        event = replace(event, **dict.fromkeys(missing, float("nan")))
        return replace(record, event=event)
    return record


@cache
def _field_kinds(event: Any) -> list[tuple[str, tuple[type, ...], bool]]:
    """Name of each field, the types that JSON gives it, and whether it must be a number."""
    hints = get_type_hints(event)
    kinds = [(f.name, _json_types(hints[f.name])) for f in fields(event)]
    return [(name, types_, float in types_ and type(None) not in types_) for name, types_ in kinds]


def _json_types(hint: Any) -> tuple[type, ...]:
    origin = get_origin(hint)
    if origin is types.UnionType:
        return tuple(kind for part in get_args(hint) for kind in _json_types(part))
    if origin is Literal:
        return (str,)  # a later version may know more of them
    return (int, float) if hint is float else (origin or hint,)
