"""Which steps the state of a run rests on at the end.

A run that resumes from step r gives up what it had completed beyond r. A process that was
given up itself cannot take anything away: what it resumes from counts for its own attempt and
those before, never for a later one.
"""

from bisect import bisect_right
from collections.abc import Sequence

from jaxrel.events import Record, Resumed

LEADER, RANK0 = "leader", "rank0"
"""The sources whose records are the run's."""


class Lineage:
    """The resumptions among `records`, by place in that sequence."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._resumes: list[tuple[int, int, int]] = []
        self._limits: dict[int, tuple[list[int], list[int]]] = {}
        for place, record in enumerate(records):
            if isinstance(record.event, Resumed) and record.source == RANK0:
                self._resumes.append((place, record.attempt, record.event.step))

    def keeps(self, place: int, attempt: int, step: int) -> bool:
        """Whether no later resumption gave up `step`, recorded at `place` by `attempt`."""
        if attempt not in self._limits:
            self._limits[attempt] = self._of_attempt(attempt)
        places, limits = self._limits[attempt]
        later = bisect_right(places, place)
        return later == len(places) or step <= limits[later]

    def _of_attempt(self, attempt: int) -> tuple[list[int], list[int]]:
        """Places of the resumptions that count for it, and the lowest step from each one on."""
        resumes = [(place, step) for place, by, step in self._resumes if by >= attempt]
        limits, lowest = [], None
        for _, step in reversed(resumes):
            lowest = step if lowest is None else min(lowest, step)
            limits.append(lowest)
        return [place for place, _ in resumes], limits[::-1]


def current(records: Sequence[Record]) -> list[int]:
    """Places of rank 0's records that were of the highest attempt yet when they were written."""
    places, highest = [], None
    for place, record in enumerate(records):
        if record.source in (LEADER, RANK0):
            highest = record.attempt if highest is None else max(highest, record.attempt)
            if record.source == RANK0 and record.attempt == highest:
                places.append(place)
    return places
