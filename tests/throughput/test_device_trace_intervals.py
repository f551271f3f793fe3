"""Interval arithmetic against a timeline of single nanoseconds."""

from hypothesis import given
from hypothesis import strategies as st

from jaxrel.throughput.device_split import split_step
from jaxrel.throughput.device_trace import Activity, DeviceTrace
from jaxrel.throughput.intervals import common, length, union, without

moments = st.integers(0, 40)
intervals = st.lists(st.tuples(moments, moments), max_size=8)
kinds = st.sampled_from(["compute", "communication", "callback", "other"])
activities = st.builds(
    Activity, st.sampled_from(["CPU:0", "CPU:1", "CPU:10"]), kinds, st.tuples(moments, moments)
)


def timeline(found: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in found for moment in range(start, end)}


def is_canonical(found: list[tuple[int, int]]) -> bool:
    edges = [edge for interval in found for edge in interval]
    return edges == sorted(set(edges))


@given(intervals, intervals)
def test_sets_of_moments(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    left, right = union(a), union(b)
    for found, expected in [
        (left, timeline(a)),
        (common(left, right), timeline(a) & timeline(b)),
        (without(left, right), timeline(a) - timeline(b)),
    ]:
        assert is_canonical(found)
        assert timeline(found) == expected
        assert length(found) == len(expected)


@given(st.lists(activities, max_size=12), moments, moments)
def test_each_nanosecond_of_a_step_is_in_one_part(found: list[Activity], a: int, b: int) -> None:
    window = min(a, b), max(a, b)
    step = set(range(*window))
    expected = {}
    for device in {activity.device for activity in found}:
        at = {
            kind: step
            & timeline([x.interval for x in found if (x.device, x.kind) == (device, kind)])
            for kind in ("compute", "communication", "callback", "other")
        }
        compute, communication, callback, other = at.values()
        exposed = communication - compute
        expected[device] = (
            len(compute),
            len(exposed),
            len(communication & compute),
            len(callback - communication - compute),
            len(other - callback - communication - compute),
            len(step - compute - communication - callback - other),
        )
    trace = DeviceTrace("cpu" if found else None, tuple(found), window)
    if all(parts[-1] == len(step) for parts in expected.values()):
        try:
            split_step(trace)
        except ValueError as error:
            assert "shows no operation" in str(error)
        else:
            raise AssertionError("a step without operations was split")
        return
    split = split_step(trace)
    for device, parts in split.devices.items():
        assert (
            parts.compute_ns,
            parts.exposed_communication_ns,
            parts.overlapped_communication_ns,
            parts.callback_ns,
            parts.other_ns,
            parts.idle_ns,
        ) == expected[device]
        assert parts.step_ns == len(step) == sum(expected[device]) - expected[device][2]
    assert set(split.devices) == set(expected)
    assert expected[split.slowest][0] == max(parts[0] for parts in expected.values())
    assert split.worst.idle_ns == max(parts[-1] for parts in expected.values())
    seconds = (
        split.compute_s,
        split.exposed_communication_s,
        split.callback_s,
        split.other_s,
        split.idle_s,
    )
    assert sum(round(s * 1e9) for s in seconds) == round(split.step_s * 1e9) == len(step)
    mean = sum(parts[0] for parts in expected.values()) / len(expected)
    assert abs(split.compute_s * 1e9 - mean) < 1
