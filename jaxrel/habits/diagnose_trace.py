"""One step under the profiler, moment by moment: who computed, who waited, and for whom.

`throughput.device_split` gives each device's own view. Here a step is one thing that all devices
finish together, so that a wait is told by what it was for: while one device is in a callback of the
host, the others, which wait for it in a collective, are in the callback too.
"""

import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions, TraceAnnotation

from jaxrel.throughput.device_trace import (
    STEP_BEGINS,
    STEP_ENDS,
    Activity,
    DeviceTrace,
    read_events,
    read_trace,
)
from jaxrel.throughput.intervals import Interval, common, length, union, without
from jaxrel.throughput.op_kinds import Kind, Program


@dataclass(frozen=True)
class Moments:
    """Seconds of one traced step; all but `alone` sum to it, or nearly where they are medians."""

    step: float
    compute: float
    communication: float
    """A collective, and neither computation nor a callback."""
    callbacks: float
    """A device is in a callback of the host."""
    idle: float
    """The rest: nothing runs, or copies and control flow that are no device's computation."""
    alone: Mapping[str, float]
    """That a device computes while no other does, by device."""


def traced(
    before: Callable[[], object], step: Callable[[], object], programs: Sequence[Program]
) -> DeviceTrace:
    """The trace of one step of a loop that keeps one under way.

    `before()` waits for the step that is under way when the one of interest has been dispatched,
    `step()` for that one. Raises RuntimeError where another profiler runs, ValueError where the
    profile has no trace.
    """
    options = ProfileOptions()
    options.host_tracer_level = 1  # operations on CPU, and the marks
    options.python_tracer_level = 0
    options.enable_hlo_proto = False
    options.raise_error_on_start_failure = True
    with tempfile.TemporaryDirectory(prefix="jaxrel-trace-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            before()
            _mark(STEP_BEGINS)
            step()
            _mark(STEP_ENDS)
        (file,) = Path(folder).rglob("*.xplane.pb")
        with warnings.catch_warnings():
            # jaxlib's types of statistics warn when they are made
            warnings.simplefilter("ignore")
            events = list(read_events(ProfileData.from_file(str(file))))
    return read_trace(events, programs)


def _mark(name: str) -> None:
    with TraceAnnotation(name):
        pass


def moments(trace: DeviceTrace, *, shared: bool) -> Moments:
    """What the devices did in the step; `shared` says that they share cores.

    On devices of their own it is the median of each part over them. Devices that share cores wait
    in a collective until the others had theirs, which is no communication: there a moment is
    computation when any of them computes.

    Raises ValueError when the trace shows no such step.
    """
    if trace.window is None or not trace.activities:
        raise ValueError("the trace shows no step of a device")
    step = union([trace.window])
    found: dict[str, dict[Kind, list[Interval]]] = {}
    for activity in _told_apart(trace):
        of = found.setdefault(activity.device, {})
        of.setdefault(activity.kind, []).append(activity.interval)
    kinds: tuple[Kind, ...] = ("compute", "communication", "callback")
    every = {
        device: {kind: common(union(kinds_of.get(kind, ())), step) for kind in kinds}
        for device, kinds_of in found.items()
    }
    computing = {device: of["compute"] for device, of in every.items()}
    callback = union(i for of in every.values() for i in without(of["callback"], of["compute"]))
    if shared:
        every = {
            "all": {kind: union(i for of in every.values() for i in of[kind]) for kind in kinds}
        }
    parts: list[tuple[int, int, int, int]] = []
    for of in every.values():
        compute = length(of["compute"])
        held_up = without(callback, of["compute"])
        talking = without(without(of["communication"], of["compute"]), callback)
        rest = length(step) - compute - length(held_up) - length(talking)
        parts.append((compute, length(talking), length(held_up), rest))
    compute, talking, held_up, rest = (
        statistics.median(part) / 1e9 for part in zip(*parts, strict=True)
    )
    return Moments(length(step) / 1e9, compute, talking, held_up, rest, _alone(computing))


def _told_apart(trace: DeviceTrace) -> list[Activity]:
    """The activities; on CPU, copies and control flow around nothing are computation.

    The CPU's compiler makes one kernel of a loop of small operations, which the trace shows as the
    loop, or a call, and nothing inside. Nobody but the device's own core copies.
    """
    if trace.source != "cpu":
        return list(trace.activities)
    found: list[Activity] = []
    order = sorted(trace.activities, key=lambda a: (a.device, a.interval[0], -a.interval[1]))
    for activity, following in pairwise([*order, None]):
        assert activity is not None
        around = (
            following is not None
            and following.device == activity.device
            and following.interval[0] < activity.interval[1]
        )
        computes = activity.kind == "other" and not around
        found.append(activity._replace(kind="compute") if computes else activity)
    return found


def _alone(computing: Mapping[str, Sequence[Interval]]) -> dict[str, float]:
    edges = sorted(
        (moment, change, device)
        for device, intervals in computing.items()
        for interval in intervals
        for moment, change in zip(interval, (1, -1), strict=True)
    )
    busy, since, seconds = set[str](), 0, dict.fromkeys(computing, 0.0)
    for moment, change, device in edges:
        if len(busy) == 1:
            seconds[next(iter(busy))] += (moment - since) / 1e9
        busy.add(device) if change > 0 else busy.discard(device)
        since = moment
    return seconds
