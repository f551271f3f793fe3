"""When the loop saves: every so many steps, or as often as theory and measurement say."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Literal

from jaxrel.checkpoint.flight import Landed
from jaxrel.checkpoint.together import agreed
from jaxrel.events import Event, IntervalPlanned
from jaxrel.plan.auto_interval import plan_interval

Interval = int | Literal["auto"]

_STEPS = 200
"""Newest steps of which the median is what a step takes: a save or evaluation is no outlier."""


class Cadence:
    """Decides which completed steps are saved; on all processes alike.

    Args:
        interval: Steps between saves, or `auto`.
        since: Completed steps at this start.
        failures: Of the run before this start, and
        observed_s: the job time in which they came; process 0's count.
        share: Of the failures, those that these saves are for, and
        tier: the name of where they go.
        tell: Takes the plans, for the record.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        interval: Interval,
        since: int = 0,
        failures: int = 0,
        observed_s: float = 0.0,
        *,
        share: float = 1.0,
        tier: str = "durable",
        tell: Callable[[Event], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = None if interval == "auto" else interval
        self._since = since
        self._failures, self._observed_s = failures, observed_s
        self._share, self._tier = share, tier
        self._tell, self._clock = tell, clock
        self._began = clock()
        self._durations: deque[float] = deque(maxlen=_STEPS)
        self._last: float | None = None
        self._next: int | None = None

    def completed(self) -> None:
        """A step is complete, just now."""
        now = self._clock()
        if self._last is not None:
            self._durations.append(now - self._last)
        self._last = now

    def due(self, done: int) -> bool:
        """Whether to save after `done` steps. Every process asks after every step."""
        if self._every is not None:
            return done % self._every == 0
        if self._next is None:
            self._next = self._since + self._plan(self._since, None)
        return done >= self._next

    def saved(self, done: int, landed: Landed | None) -> None:
        """Step `done` is being saved; `landed` is the newest save that is complete. Collective."""
        if self._every is None:
            self._next = done + self._plan(done, landed)

    def _plan(self, done: int, landed: Landed | None) -> int:
        plan = plan_interval(
            median(self._durations) if self._durations else None,
            None if landed is None else landed.blocking_s,
            None if landed is None else landed.seconds,
            self._failures,
            self._observed_s + self._clock() - self._began,
            share=self._share,
        )
        steps = agreed(lambda: plan.steps)
        self._tell(IntervalPlanned(done, tier=self._tier, **asdict(plan)))
        return steps
