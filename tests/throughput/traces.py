"""Traces by hand: a profile from plain Python, by way of XLA's own reader."""

import json
from collections.abc import Mapping
from typing import Any

from jax.profiler import ProfileData

from jaxrel.throughput.device_split import DeviceSplit, split_step
from jaxrel.throughput.device_trace import STEP_BEGINS, STEP_ENDS, read_events, read_trace
from jaxrel.throughput.op_kinds import read_program

Row = tuple[str, int, int] | tuple[str, int, int, Mapping[str, Any]]
"""Name, start and end in nanoseconds, statistics."""
Lines = Mapping[str, list[Row]]


def profile(planes: Mapping[str, Lines]) -> Any:
    """The `ProfileData` with these planes of lines of events."""
    return ProfileData.from_text_proto(
        "".join(
            f"planes {{ name: {json.dumps(name)} {_plane(lines)} }}"
            for name, lines in planes.items()
        )
    )


def _plane(lines: Lines) -> str:
    names: dict[str, int] = {}
    keys: dict[str, int] = {}
    text = ""
    for line, rows in lines.items():
        text += f"lines {{ name: {json.dumps(line)} "
        for name, start, end, *stats in rows:
            found: Mapping[str, Any] = stats[0] if stats else {}
            number = names.setdefault(name, len(names) + 1)
            text += f"events {{ metadata_id: {number} offset_ps: {start * 1000} "
            text += f"duration_ps: {(end - start) * 1000} "
            for key, value in found.items():
                kind = "str_value" if isinstance(value, str) else "int64_value"
                number = keys.setdefault(key, len(keys) + 1)
                text += f"stats {{ metadata_id: {number} {kind}: {json.dumps(value)} }} "
            text += "} "
        text += "} "
    for table, entries in (("event_metadata", names), ("stat_metadata", keys)):
        for name, number in entries.items():
            text += f"{table} {{ key: {number} value {{ id: {number} name: {json.dumps(name)} }} }}"
    return text


def host(begin: int, end: int) -> Lines:
    """The host's plane with the marks of a step."""
    return {"python": [(STEP_BEGINS, begin, begin), (STEP_ENDS, end, end)]}


def split(planes: Mapping[str, Lines], *programs: str) -> DeviceSplit:
    events = read_events(profile(planes))
    return split_step(read_trace(events, [read_program(text) for text in programs]))
