"""Ratios of interleaved runs, and what may be said of them on a shared machine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios and its 95% bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(over: Sequence[float], under: Sequence[float], resamples: int = 2000) -> Ratio:
    """`over[i] / under[i]` for runs of the same round i; the resampling has a fixed seed."""
    ratios = np.asarray(over) / np.asarray(under)
    picks = np.random.default_rng(0).integers(0, len(ratios), (resamples, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), [0.025, 0.975])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def verdict(ratio: Ratio, control: Ratio, bar: float) -> str:
    """`met`, `not met` or `undecided`: is `ratio` at most `bar`?

    `control` compares a step with itself. The question is open while the control's interval,
    1.0 included, is not narrower than the margin `bar - 1`, and while `ratio` straddles `bar`.
    """
    noise = max(control.high, 1.0) - min(control.low, 1.0)
    if noise >= bar - 1.0 or ratio.low <= bar < ratio.high:
        return "undecided"
    return "met" if ratio.high <= bar else "not met"
