"""Tokens per second, MFU and HFU of every completed step, and what adds up over a run."""

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrel.plan.peaks import Peak
from jaxrel.throughput.drift import Drift, Drifted
from jaxrel.throughput.timer import StepParts, StepTimer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step on all devices together, and how they were counted."""

    model: float | None
    """What the mathematics needs, each product once; None when it is not known."""
    hardware: float | None
    """What the compiled program does, recomputation included; None when it is not known."""
    definition: str


UNKNOWN = StepFlops(None, None, "not counted")


_WINDOW = 5
"""Steps over which a rate is taken. A process that was kept from running sees one step complete
late, and the next, under way meanwhile, in no time: alone, that one would beat the peak."""


@dataclass(frozen=True)
class Throughput:
    """At one completed step: its own parts, and rates over the newest five steps."""

    parts: StepParts
    tokens_per_s: float | None
    mfu: float | None
    """Model FLOPs over what the devices could have done in the time, 0 to 1; None when FLOPs or
    peak are unknown, or the value would be above 1."""
    hfu: float | None
    drifted: Drifted | None
    """Steps have become slower, which this one shows first."""


class ThroughputMeter:
    """Measures a training loop that says what it is at; adds no work to the devices and no wait.

    Args:
        tokens: One step trains on.
        devices: That run the step together.
        peak: FLOP/s of one device, and where that is from.
        flops: Of one step. May be set later: MFU is None until then.
        timer: By default one of its own.

    MFU or HFU above 1 means that FLOPs, peak or clock are wrong: it is warned of once, and None.
    """

    def __init__(
        self,
        tokens: int | None,
        devices: int,
        peak: Peak,
        flops: StepFlops = UNKNOWN,
        timer: StepTimer | None = None,
    ) -> None:
        self.tokens, self.devices, self.peak, self.flops = tokens, devices, peak, flops
        self.timer = timer or StepTimer()
        self.attempt_steps = 0
        """Completed since this meter was made."""
        self._before: dict[str, int] = {"steps": 0, "tokens": 0}
        self._drift = Drift()
        self._newest: deque[float] = deque(maxlen=_WINDOW)
        self._warned: set[str] = set()

    def completed(self) -> Throughput:
        """A step was seen complete, just now."""
        parts = self.timer.completed()
        self.attempt_steps += 1
        self._newest.append(parts.step_s)
        mean_s = sum(self._newest) / len(self._newest)
        return Throughput(
            parts,
            self.tokens / mean_s if self.tokens and mean_s > 0 else None,
            self._utilisation("MFU", self.flops.model, mean_s),
            self._utilisation("HFU", self.flops.hardware, mean_s),
            self._drift.add(parts.step_s),
        )

    @property
    def definition(self) -> str:
        """What the numbers mean: goes with every one of them."""
        return f"{self.flops.definition}; {self.devices} devices; peak: {self.peak.source}"

    def state(self) -> dict[str, Any]:
        """Steps and tokens of the whole run so far, and what drift is measured against, as JSON:
        what a checkpoint keeps."""
        tokens = self.attempt_steps * (self.tokens or 0)
        return {
            "steps": self._before["steps"] + self.attempt_steps,
            "tokens": self._before["tokens"] + tokens,
            "best_step_s": self._drift.best_s,
            "devices": self.devices,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state` of a checkpoint: of steps after it nothing counts."""
        self._before = {name: int(state[name]) for name in self._before}
        self.attempt_steps = 0
        if state.get("devices") == self.devices:  # on others a step takes another time
            self._drift.best_s = state.get("best_step_s")

    def _utilisation(self, name: str, flops: float | None, step_s: float) -> float | None:
        if flops is None or self.peak.flops is None or step_s <= 0:
            return None
        share = flops / (step_s * self.devices * self.peak.flops)
        if 0 <= share <= 1:
            return share
        if name not in self._warned:
            self._warned.add(name)
            value = "not a number" if math.isnan(share) else "above 1"
            log.warning("%s would be %s, which cannot be: check %s", name, value, self.definition)
        return None
