"""Sets of moments, as lists of intervals.

An interval is (start, end) in integer nanoseconds, its end not included. Every function but
`union` takes and gives what `union` gives: in order, none empty, none touching the next.
"""

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments in any of `intervals`; those that end before they start hold none."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The moments in both."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The moments in `a` that are not in `b`."""
    if not a:
        return []
    edges = [a[0][0], *(moment for interval in b for moment in interval), a[-1][1]]
    return common(a, union(zip(edges[::2], edges[1::2], strict=True)))


def length(a: Iterable[Interval]) -> int:
    """How long the intervals are together, in nanoseconds."""
    return sum(end - start for start, end in a)
