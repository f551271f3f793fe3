"""Steps that become slower for good: the first sign of a straggler. Pure."""

from collections import deque
from dataclasses import dataclass
from statistics import median

_BASE, _RECENT = 50, 20
_RATIO = 1.15


@dataclass(frozen=True)
class Drifted:
    """Steps take longer than they did."""

    before_s: float
    """Median of the fastest steps so far, as many as were compared."""
    now_s: float
    """Median of the newest."""


class Drift:
    """Compares the newest steps with the best that the run has shown on these devices.

    One step, or a few, say nothing: it is the median of the newest 20 that must exceed the lowest
    median of any 50 in a row by 15%. It is told once, and again after it has gone away.
    """

    def __init__(self) -> None:
        self.best_s: float | None = None
        """The lowest median of 50 steps in a row, also of an attempt before this one."""
        self._window: deque[float] = deque(maxlen=_BASE)
        self._told = False

    def add(self, step_s: float) -> Drifted | None:
        """A step took so long; the drift that this shows for the first time."""
        self._window.append(step_s)
        if len(self._window) < _BASE:
            return None
        whole, recent = median(self._window), median(list(self._window)[-_RECENT:])
        self.best_s = whole if self.best_s is None else min(self.best_s, whole)
        slow = recent > _RATIO * self.best_s
        if slow and not self._told:
            self._told = True
            return Drifted(self.best_s, recent)
        self._told = slow
        return None
