"""One step on its devices, split into parts that sum to it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from jaxrel.throughput.device_trace import DeviceTrace, Source
from jaxrel.throughput.intervals import Interval, common, length, union, without
from jaxrel.throughput.op_kinds import Kind


@dataclass(frozen=True)
class Parts:
    """One device's time in a step, in nanoseconds.

    Compute, exposed communication, callback, other and idle sum to the step, exactly.
    """

    step_ns: int
    compute_ns: int
    """At least one operation computed."""
    exposed_communication_ns: int
    """A collective was under way, its wait for other devices included, and nothing computed."""
    overlapped_communication_ns: int
    """A collective was under way beside compute: part of `compute_ns`."""
    callback_ns: int
    """Else, the host computed for the device, where the trace shows it."""
    other_ns: int
    """Else, copies, infeed, outfeed, or control flow between operations."""
    idle_ns: int
    """The rest: nothing ran on the device."""


@dataclass(frozen=True)
class DeviceSplit:
    """The mean over devices of `Parts`, in seconds; the parts sum to `step_s` to the nanosecond.

    On CPU, simulated devices share cores: an operation's time includes its waits for a core.
    """

    step_s: float
    compute_s: float
    exposed_communication_s: float
    overlapped_communication_s: float
    callback_s: float
    other_s: float
    idle_s: float
    devices: Mapping[str, Parts]
    """Of each device of this process, by its name in the trace."""
    worst: Parts
    """The largest of each part over the devices; they do not sum."""
    slowest: str
    """The device that computed longest."""
    source: Source
    """The form of trace: `tpu` and `gpu` have not been run on hardware."""


def split_step(trace: DeviceTrace) -> DeviceSplit:
    """The split of the step between the marks of `trace`.

    Raises ValueError, with the reason, when the trace shows no such step.
    """
    if trace.source is None:
        raise ValueError("the trace shows no operation of a device")
    if trace.window is None:
        raise ValueError("the trace lacks the marks of the step's begin and end")
    window = trace.window
    by_device: dict[str, dict[Kind, list[Interval]]] = {}
    for activity in trace.activities:
        kinds = by_device.setdefault(activity.device, {})
        kinds.setdefault(activity.kind, []).append(activity.interval)
    devices = {name: _parts(by_device[name], window) for name in sorted(by_device, key=_order)}
    if all(parts.idle_ns == parts.step_ns for parts in devices.values()):
        raise ValueError("the trace shows no operation of a device within the step")
    each = [asdict(parts) for parts in devices.values()]
    mean = {name: sum(parts[name] for parts in each) // len(each) for name in each[0]}
    # What whole nanoseconds leave over.
    mean["idle_ns"] += mean["step_ns"] - sum(mean[part] for part in _DISJOINT)
    return DeviceSplit(
        **{name.removesuffix("_ns") + "_s": ns / 1e9 for name, ns in mean.items()},
        devices=devices,
        worst=Parts(**{name: max(parts[name] for parts in each) for name in each[0]}),
        slowest=max(devices, key=lambda name: devices[name].compute_ns),
        source=trace.source,
    )


_DISJOINT = ("compute_ns", "exposed_communication_ns", "callback_ns", "other_ns", "idle_ns")


def _parts(kinds: Mapping[Kind, list[Interval]], window: Interval) -> Parts:
    """The parts of one device; of kinds at one moment the first counts, in the order below."""
    compute, communication, callback, other = (
        common(union(kinds.get(kind, ())), union([window]))
        for kind in ("compute", "communication", "callback", "other")
    )
    exposed = without(communication, compute)
    busy = union([*compute, *communication])
    callback_alone = without(callback, busy)
    busy = union([*busy, *callback])
    other_alone = without(other, busy)
    busy = union([*busy, *other])
    step = window[1] - window[0]
    return Parts(
        step_ns=step,
        compute_ns=length(compute),
        exposed_communication_ns=length(exposed),
        overlapped_communication_ns=length(common(communication, compute)),
        callback_ns=length(callback_alone),
        other_ns=length(other_alone),
        idle_ns=step - length(busy),
    )


def _order(device: str) -> tuple[str, int]:
    """So that `CPU:10` follows `CPU:9`."""
    kind, _, ordinal = device.partition(":")
    return kind, int(ordinal) if ordinal.isdigit() else -1
