"""Where the time of each step goes, as the process that runs the loop sees it.

The loop says what it turns to; nothing here waits for a device. Time that passes while the
devices are known to be still at work is no loss, whatever the host did meanwhile: it is theirs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Part = Literal["data", "dispatch", "compute", "checkpoint", "other", "excluded"]
"""What the loop is at. `compute` is the wait for the devices; `excluded` is no part of a step:
compilation, evaluation, restoring."""


@dataclass(frozen=True)
class StepParts:
    """Seconds from the completion of one step to that of the next; the parts sum to `wall_s`."""

    wall_s: float
    """Without what is excluded."""
    data_s: float
    """Waiting for the batch, with idle devices."""
    dispatch_s: float
    """Placing the batch and starting the step, with idle devices."""
    compute_s: float
    """The devices' own time, exposed communication apart."""
    communication_s: float
    """Of the devices' time, collectives that no computation covered: the share that the last
    sampled step had; 0 before there is one."""
    checkpoint_s: float
    """Blocked by a save."""
    other_s: float
    """The rest: what the loop itself does, with idle devices."""

    @property
    def step_s(self) -> float:
        """What a step takes: without saves, with the wait for data."""
        return self.wall_s - self.checkpoint_s


class StepTimer:
    """Splits the time between completed steps. Not thread-safe: the loop's own."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._part: Part = "excluded"
        self._since = clock()
        self._spent: dict[Part, float] = {}
        self.communication_share = 0.0
        """Of the devices' time, from the last sampled step, 0 to 1."""

    def turn_to(self, part: Part, *, busy: bool = False) -> None:
        """The loop turns to `part`; `busy` says that the devices still worked when it did."""
        now = self._clock()
        was = self._part
        if busy and was in ("data", "dispatch", "other"):
            was = "compute"
        self._spent[was] = self._spent.get(was, 0.0) + now - self._since
        self._part, self._since = part, now

    def completed(self) -> StepParts:
        """A step was seen complete, just now; the next begins in part `other`."""
        self.turn_to("other")
        spent, self._spent = self._spent, {}
        devices = spent.get("compute", 0.0)
        communication = devices * self.communication_share
        data, dispatch = spent.get("data", 0.0), spent.get("dispatch", 0.0)
        checkpoint, other = spent.get("checkpoint", 0.0), spent.get("other", 0.0)
        compute = devices - communication
        wall = data + dispatch + compute + communication + checkpoint + other
        return StepParts(wall, data, dispatch, compute, communication, checkpoint, other)
