"""`checkpoint.interval: auto`: how many steps between saves, from what a run has measured.

How often a run fails is learned on the way. The failure rate has a Gamma prior, worth
PRIOR_FAILURES failures in PRIOR_S seconds of job time, and failures that come at random update it
to a Gamma again, so its mean is

    (PRIOR_FAILURES + failures) / (PRIOR_S + observed seconds),

whose inverse is taken for M. The mean of the rate is what counts: the time that a run wastes is,
to first order, linear in the rate, so the interval that is best on average is the one for it.

With two tiers each has the failures that it is there for, as in `first_order.two_levels`: the
local one a share LOCAL_SHARE of them, the durable one the rest.
"""

import math
from dataclasses import dataclass
from typing import Literal

from jaxrel.plan.interval import optimum

PRIOR_FAILURES = 1.0
"""So little that the first real failures count for more than the guess."""
PRIOR_S = 8 * 3600.0
"""Between what is published for jobs of 2048 GPUs (14 hours, arXiv 2410.21680) and of 16384 (3
hours, Llama 3). A small job fails less often, so it saves too often for a day, and loses little:
an M that is four times too small halves the interval, and the optimum is flat."""
LOCAL_SHARE = 0.9
"""Of failures, those that a local tier with a copy on another host recovers from: not more than one
host is lost. Of the 419 unexpected interruptions of Llama 3 (arXiv 2407.21783, table 5) all were
of that kind but 35 of network switches and cables, which may take several."""
UNMEASURED_STEPS = 20
"""Steps between saves while their cost is not known: soon enough to learn it."""
_LEAST_S, _MOST_S = 1e-9, 1e12
"""What the formulas take."""


@dataclass(frozen=True)
class IntervalPlan:
    """An interval and everything that it follows from; JSON values, None is unknown."""

    steps: int
    """Between saves."""
    decided_by: Literal["optimum", "least", "unmeasured"]
    """What set `steps`: theory, the least of one write and one step, or nothing measured yet."""
    optimal_s: float | None
    """Compute between saves that wastes least."""
    mtbf_s: float
    """Inverse of the mean failure rate."""
    step_s: float | None
    """Seconds of a step, without saves."""
    cost_s: float | None
    """Seconds that a save stops the loop."""
    write_s: float | None
    """Seconds from the beginning of a save to its commit."""
    failures: int
    """Of the job so far."""
    observed_s: float
    """Job time in which they came."""
    share: float = 1.0
    """Of the failures, those that these saves are for."""
    prior_failures: float = PRIOR_FAILURES
    prior_s: float = PRIOR_S


def expected_mtbf(failures: int, observed_s: float) -> float:
    """Seconds between failures: the inverse of the mean rate after `failures` in `observed_s`."""
    return (PRIOR_S + observed_s) / (PRIOR_FAILURES + failures)


def plan_interval(
    step_s: float | None,
    cost_s: float | None,
    write_s: float | None,
    failures: int,
    observed_s: float,
    unmeasured_steps: int = UNMEASURED_STEPS,
    share: float = 1.0,
) -> IntervalPlan:
    """Steps between saves; for the units see `IntervalPlan`.

    The exact optimum for what a save costs the loop, whatever a restart takes, rounded to steps;
    at least one write long, so that saves never meet, and at least one step. A background write
    costs what it blocks: with C = write_s and (1-w) C = cost_s it is the overlapped optimum.

    A measurement that is None, not finite or below 0 is unknown, as is a step of no time. Without
    step time or cost the answer is `unmeasured_steps`; an unknown write takes as long as it
    blocks. `share` is that of the failures which these saves are for. Never raises: a running job
    does not end over a measurement.
    """
    step, cost, write = _known(step_s, _LEAST_S), _known(cost_s), _known(write_s)
    failures, observed = max(0, failures), _known(observed_s) or 0.0
    mtbf = min(max(_LEAST_S, expected_mtbf(failures, observed)), _MOST_S)
    optimal = None if cost is None else optimum(min(mtbf / share, _MOST_S), cost)
    inputs = (optimal, mtbf, step, cost, write, failures, observed, share)
    if step is None or cost is None or optimal is None:
        return IntervalPlan(max(1, unmeasured_steps), "unmeasured", *inputs)
    steps, least = round(optimal / step), max(1, math.ceil(max(cost, write or 0.0) / step))
    return IntervalPlan(max(steps, least), "optimum" if steps >= least else "least", *inputs)


def _known(seconds: float | None, least_s: float = 0.0) -> float | None:
    """A measured duration; None when it cannot be one."""
    return seconds if seconds is not None and least_s <= seconds <= _MOST_S else None
