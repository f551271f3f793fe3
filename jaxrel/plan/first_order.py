"""Published relations of first order: to compare with papers, never reported as efficiency.

M is the mean time between failures, C the cost of a checkpoint, R the time of a restart (with
any time before it), all in seconds; a waste is a share of the run time that is not compute, and
may exceed 1 where failures are too frequent for a first order.
"""

import math
from dataclasses import dataclass

from jaxrel.exit_codes import UsageError
from jaxrel.plan.quantities import check


def waste(interval_s: float, mtbf_s: float, cost_s: float, restart_s: float = 0.0) -> float:
    """C/tau + (tau/2 + R)/M for tau seconds of compute between checkpoints (Young 1974).

    At Young's tau it is sqrt(2C/M) + R/M.
    """
    check(interval=interval_s, mtbf=mtbf_s, cost=cost_s, restart=restart_s)
    return cost_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s


def overlapped_period(
    mtbf_s: float, cost_s: float, restart_s: float = 0.0, overlap: float = 0.0
) -> float:
    """Seconds from save to save when work goes on at the share w of full speed during a write.

    sqrt(2 (1-w) C (M - R - w C)), at least C (Aupy et al., arXiv 1310.8456; R has the downtime).
    Raises UsageError where M is no more than R + w C.
    """
    check(mtbf=mtbf_s, cost=cost_s, restart=restart_s, overlap=overlap)
    left = mtbf_s - restart_s - overlap * cost_s
    if left <= 0:
        raise UsageError(f"mtbf: got {mtbf_s:g}: expected more than {mtbf_s - left:g} s, R + w C")
    return max(math.sqrt(2 * (1 - overlap) * cost_s * left), cost_s)


def overlapped_waste(
    period_s: float, mtbf_s: float, cost_s: float, restart_s: float = 0.0, overlap: float = 0.0
) -> float:
    """1 - (1 - (1-w) C/T) (1 - (R + w C + T/2)/M) for the period T, the write included."""
    check(period=period_s, mtbf=mtbf_s, cost=cost_s, restart=restart_s, overlap=overlap)
    without_failures = 1 - (1 - overlap) * cost_s / period_s
    return 1 - without_failures * (1 - (restart_s + overlap * cost_s + period_s / 2) / mtbf_s)


@dataclass(frozen=True)
class TwoLevels:
    """Seconds of compute between local checkpoints and between remote ones, and the waste."""

    local_s: float
    remote_s: float
    waste: float


def two_levels(
    mtbf_s: float, local_share: float, cost_s: tuple[float, float], restart_s: tuple[float, float]
) -> TwoLevels:
    """Two tiers: a share f of the failures can be recovered from the local one.

    `cost_s` and `restart_s` are (local, remote). Each level is a run of its own with the failures
    that it is there for: t1 = sqrt(2 C1 M/f), t2 = sqrt(2 C2 M/(1-f)), and the wastes add up.
    Derived, not published, and not simulated. Raises UsageError.
    """
    if not 0 < local_share < 1:
        raise UsageError(f"local share: got {local_share:g}: expected more than 0 and less than 1")
    intervals, total = [], 0.0
    for share, cost, restart in zip((local_share, 1 - local_share), cost_s, restart_s, strict=True):
        check(mtbf=mtbf_s, cost=cost, restart=restart)
        between = mtbf_s / share
        intervals.append(math.sqrt(2 * cost * between))
        total += waste(intervals[-1], between, cost, restart)
    return TwoLevels(intervals[0], intervals[1], total)


def availability_interval(mtbf_s: float, cost_s: float, restart_s: float = 0.0) -> float:
    """Seconds from the start of a checkpoint to the start of the next, the cost included.

    C + sqrt(2 (M + R) C + C**2), of the highest availability (Saxena et al., arXiv 2410.18124).
    """
    check(mtbf=mtbf_s, cost=cost_s, restart=restart_s)
    return cost_s + math.sqrt(2 * (mtbf_s + restart_s) * cost_s + cost_s**2)


def job_mtbf(nodes: int, failures_per_node_day: float) -> float:
    """Seconds between failures of a job on `nodes` nodes, each failing on its own.

    86400/(nodes * rate) (Kokolis et al., arXiv 2410.21680, in which 6.5 failures per 1000 node-days
    were found and a node has 8 GPUs).
    """
    if nodes < 1:
        raise UsageError(f"nodes: got {nodes}: expected at least 1")
    if not 0 < failures_per_node_day < math.inf:
        raise UsageError(
            f"failures per node-day: got {failures_per_node_day:g}: expected a number above 0"
        )
    return 86400 / (nodes * failures_per_node_day)


def effective_training_time(
    interval_s: float, mtbf_s: float, cost_s: float, restart_s: float = 0.0
) -> float:
    """(1 - (R + tau/2)/M) / (1 + C/tau), expected (Kokolis et al., arXiv 2410.21680)."""
    check(interval=interval_s, mtbf=mtbf_s, cost=cost_s, restart=restart_s)
    return (1 - (restart_s + interval_s / 2) / mtbf_s) / (1 + cost_s / interval_s)
