"""What each device did, read from a JAX profile.

Three forms of trace (XLA's `xplane_schema.h` has the names):

- TPU: a plane `/device:TPU:0` a core. The line `XLA Ops` has every operation as it ran, `while`
  and the like around their bodies; `Async XLA Ops` what goes on beside them. SparseCore planes
  are left out: what they do shows as asynchronous operations of the core that waits for it.
- GPU: a plane `/device:GPU:0` a device, with a line `Stream #...` for each stream, of kernels and
  copies. NCCL's kernels run while they wait for their peers. A host callback does not show.
- CPU: operations are on threads of `/host:CPU`, each with the id of its JAX device. Devices share
  cores, so an operation's time includes its waits for a core; what it goes on doing in a pool of
  threads after its launch has returned does not show, and counts as idle.

JAX's reader shows an event's own statistics and not those of its metadata, `hlo_category` among
them, so names decide. The CPU form was read from real profiles of JAX 0.10.2 and 0.12.0. Those of
TPU and GPU are written after the documents and were not run on hardware.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from jaxrel.throughput.intervals import Interval
from jaxrel.throughput.op_kinds import Kind, Program, kernel_kind, kind_of, operation_name

STEP_BEGINS = "jaxrel: step begins"
STEP_ENDS = "jaxrel: step ends"
"""Marks that the host leaves in the trace (`jax.profiler.TraceAnnotation`)."""

Source = Literal["tpu", "gpu", "cpu"]
_FORMS: tuple[Source, ...] = ("tpu", "gpu", "cpu")

_HOST_PLANE = "/host:CPU"
_DEVICE_PLANE = re.compile(r"/device:(TPU|GPU):\d+")
_TPU_OPS, _TPU_ASYNC = "XLA Ops", "Async XLA Ops"
_LINES = {"TPU": re.compile(f"{_TPU_OPS}|{_TPU_ASYNC}"), "GPU": re.compile("Stream #.*")}
# Most of what a CPU trace holds, and none of it an operation.
_HOST_NOISE = ("ThreadpoolListener::", "end: ", "Wait", "Rendezvous")


class Event(NamedTuple):
    """One event of a trace."""

    plane: str
    line: str
    name: str
    interval: Interval
    stats: Mapping[str, Any]


class Activity(NamedTuple):
    """What one device did for a while."""

    device: str
    """`TPU:0`, `GPU:0`, `CPU:0`: as the trace numbers it."""
    kind: Kind
    interval: Interval


@dataclass(frozen=True)
class DeviceTrace:
    """A trace, as far as devices go."""

    source: Source | None
    """What it is of; None when it shows no operation of a device."""
    activities: tuple[Activity, ...]
    window: Interval | None
    """From the last mark that a step begins to the last that one ends; None without both."""


def read_events(data: Any) -> Iterator[Event]:
    """The events of a `jax.profiler.ProfileData` that may matter here, in its own clock.

    Raises RuntimeError where the profile is damaged.
    """
    for plane in data.planes:
        device = _DEVICE_PLANE.fullmatch(plane.name)
        if not device and plane.name != _HOST_PLANE:
            continue
        for line in plane.lines:
            if device and not _LINES[device[1]].fullmatch(line.name):
                continue
            for event in line.events:
                if not device and event.name.startswith(_HOST_NOISE):
                    continue
                start = round(event.start_ns)
                interval = start, start + round(event.duration_ns)
                yield Event(plane.name, line.name, event.name, interval, dict(event.stats))


def read_trace(events: Iterable[Event], programs: Sequence[Program] = ()) -> DeviceTrace:
    """What devices did, from the events of a trace; `programs` are those that may have run."""
    by_name = {program.name: program for program in programs}
    only = programs[0] if len(programs) == 1 else None

    @cache
    def kind(form: Source, name: str, operation: str | None, module: str | None) -> Kind:
        program = only if module is None else by_name.get(module)
        if form == "gpu":
            return kernel_kind(name, operation, program)
        return kind_of(name if operation is None else operation, program)

    marks: dict[str, int] = {}
    found: dict[Source, list[Activity]] = {}
    asynchronous = _Asynchronous()
    for event in sorted(events, key=lambda e: e.interval):
        if event.name in (STEP_BEGINS, STEP_ENDS):
            marks[event.name] = event.interval[0]
        if (place := _place(event)) is None:
            continue
        form, device = place
        operation = event.stats.get("hlo_op")
        named = None if form == "tpu" and event.line == _TPU_OPS else operation
        what = kind(form, event.name, named, event.stats.get("hlo_module"))
        activities = found.setdefault(form, [])
        if form == "tpu" and what == "communication":
            flight = asynchronous.flight(device, event)
            activities.append(Activity(device, what, flight or event.interval))
        # A copy on its way takes none of the core's time.
        elif event.line != _TPU_ASYNC:
            activities.append(Activity(device, what, event.interval))
    source: Source | None = next((form for form in _FORMS if form in found), None)
    marked = STEP_BEGINS in marks and STEP_ENDS in marks
    return DeviceTrace(
        source,
        tuple(found[source]) if source else (),
        (marks[STEP_BEGINS], marks[STEP_ENDS]) if marked else None,
    )


def _place(event: Event) -> tuple[Source, str] | None:
    """The form of trace and the device of an event; None for the host's own."""
    if event.plane == _HOST_PLANE:
        ordinal = event.stats.get("device_ordinal", "all")
        return ("cpu", f"CPU:{ordinal}") if "hlo_op" in event.stats else None
    device = event.plane.removeprefix("/device:")
    return ("tpu" if device.startswith("TPU") else "gpu"), device


class _Asynchronous:
    """Pairs the start of an asynchronous operation with its end, on each TPU core.

    Events of `Async XLA Ops` that belong together carry the same `flow`; on `XLA Ops` the end
    names its start as the operand, or has the start's name with `done` for `start`.
    """

    def __init__(self) -> None:
        self._started: dict[tuple[str, str], int] = {}

    def flight(self, device: str, event: Event) -> Interval | None:
        """The time from start to end, if `event`, the next in order of time, ends one."""
        begins, ends = event.interval
        flow = event.stats.get("flow")
        if flow is not None and event.line == _TPU_ASYNC:
            return self._started.setdefault((device, f"flow {flow}"), begins), ends
        name = operation_name(event.name)
        if "-start" in name:
            self._started[device, name] = begins
        elif "-done" in name:
            operand = re.search(r"-done\((?:[^%]*%)?([\w.-]+)", event.name)
            start = operand[1] if operand else name.replace("-done", "-start")
            if (began := self._started.pop((device, start), None)) is not None:
                return began, ends
        return None
