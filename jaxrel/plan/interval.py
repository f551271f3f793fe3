"""How long to compute between two checkpoints, and what any interval costs.

M is the mean time between failures, C what a checkpoint costs, R what a restart takes, w the
share of full speed at which work goes on during the write of a checkpoint, tau the compute
between two checkpoints, without C; all but w in seconds. Failures come at random (exponential
times between them) at any moment, also during a checkpoint or a restart; then the run goes
back to the newest whole checkpoint.

What is called exact is exact in this model. The optimum is flat, so any of the estimates will
do for the interval; the efficiency is not: at C/M = 1/3 the first order says 0.18, and it is
0.39. So nothing that is reported as efficiency is of first order.

Sources: Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974;
Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
Generation Computer Systems 22(3), 2006; Aupy et al., Optimal checkpointing period: time vs.
energy, arXiv 1310.8456 (overlap).
"""

import math
import textwrap
from typing import Any

from scipy.special import lambertw

from jaxrel.exit_codes import UsageError
from jaxrel.plan.first_order import overlapped_period, overlapped_waste
from jaxrel.plan.quantities import check


def young(mtbf_s: float, cost_s: float) -> float:
    """Young's tau, sqrt(2 C M): the first order, for C much below M."""
    check(mtbf=mtbf_s, cost=cost_s)
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(mtbf_s: float, cost_s: float) -> float:
    """Daly's tau of higher order: 0.6% below the optimum at C = M/2, and M from C = 2M on."""
    check(mtbf=mtbf_s, cost=cost_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    x = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - cost_s


def optimum(mtbf_s: float, cost_s: float, overlap: float = 0.0) -> float:
    """The tau of the highest efficiency; exact, and the same for every R.

    The derivative of (exp((tau+C)/M) - 1)/tau is 0 where (tau/M - 1) exp(tau/M - 1) =
    -exp(-1 - C/M), so tau = M (1 + W0(-exp(-1 - C/M))) with Lambert's W. With an overlap w only
    (1-w) C of C counts, and writes must not meet: tau is at least w C. See `efficiency`.
    """
    check(mtbf=mtbf_s, cost=cost_s, overlap=overlap)
    blocking = (1 - overlap) * cost_s / mtbf_s
    if blocking < 1e-6:  # W0 next to its branch point loses digits: its series there
        p = math.sqrt(-2 * math.expm1(-blocking))
        ratio = p - p**2 / 3 + 11 * p**3 / 72
    else:
        ratio = 1 + float(lambertw(-math.exp(-1 - blocking)).real)
    return max(mtbf_s * ratio, overlap * cost_s)


def efficiency(
    interval_s: float,
    mtbf_s: float,
    cost_s: float,
    restart_s: float = 0.0,
    overlap: float = 0.0,
) -> float:
    """Useful compute over expected run time, 0 to 1; exact.

    An interval without failures takes tau + (1-w) C. After a failure it takes R, then w C more,
    to do again what was done beside the write of the checkpoint that is gone back to. In all

        tau / (M exp((R + w C)/M) (exp((tau + (1-w) C)/M) - 1)),

    which without overlap is Daly's. Raises UsageError, also where writes would meet (tau < w C).
    """
    check(mtbf=mtbf_s, cost=cost_s, restart=restart_s, overlap=overlap, interval=interval_s)
    hidden = overlap * cost_s
    if interval_s < hidden:
        raise UsageError(
            f"interval: got {interval_s:g}: expected at least {hidden:g} s, the work beside a write"
        )
    period = interval_s + cost_s - hidden
    # Only negative exponents: no overflow, however bad the odds.
    survival = math.exp(-(period + restart_s + hidden) / mtbf_s)
    return interval_s / mtbf_s * survival / -math.expm1(-period / mtbf_s)


def expected_run_time(
    work_s: float,
    interval_s: float,
    mtbf_s: float,
    cost_s: float,
    restart_s: float = 0.0,
    overlap: float = 0.0,
    *,
    restart_can_fail: bool = True,
) -> float:
    """Expected seconds for `work_s` of compute, a checkpoint after its last interval included.

    M exp(R/M) (exp((tau+C)/M) - 1) work/tau (Daly 2006): a restart that fails begins again. When
    restarts cannot fail, exp(R/M) is 1 + R/M. Infinite where the efficiency rounds to 0.
    """
    check(work=work_s, restart=restart_s)
    within = restart_s if restart_can_fail else 0.0
    share = efficiency(interval_s, mtbf_s, cost_s, within, overlap)
    outside = 1.0 if restart_can_fail else 1 + restart_s / mtbf_s
    return work_s * outside / share if share > 0 else math.inf


def lost_work_per_failure(
    interval_s: float,
    mtbf_s: float,
    cost_s: float,
    restart_s: float = 0.0,
    overlap: float = 0.0,
) -> float:
    """Expected compute lost to a failure, in seconds at full speed; exact.

    Without overlap a failure after x seconds of an interval loses min(x, tau), so one in it loses

        L = (M (1 - exp(-tau/M)) - tau exp(-(tau+C)/M)) / (1 - exp(-(tau+C)/M)),

    just below (tau+C)/2. Of the failures a share 1 - exp(-R/M) strikes during a restart,
    where there is nothing to lose: L exp(-R/M) a failure. With overlap the same mean is taken
    over the two ways to be in an interval: straight from the one before, with w C of work that
    only the next checkpoint will hold, or after a restart, with that work to be done again.
    """
    efficiency(interval_s, mtbf_s, cost_s, restart_s, overlap)  # for its checks
    hidden = overlap * cost_s
    period = interval_s + cost_s - hidden
    after_restart = math.exp(-restart_s / mtbf_s) * _lost(
        period + hidden, 0.0, mtbf_s, cost_s, overlap
    )
    straight = _lost(period, hidden, mtbf_s, cost_s, overlap)
    # One failure straight, then exp(...) restarts on average until one reaches its end.
    rarely = math.exp(-(restart_s + hidden + period) / mtbf_s) / -math.expm1(-period / mtbf_s)
    return straight * rarely + after_restart


def _lost(length_s: float, already_s: float, mtbf_s: float, cost_s: float, overlap: float) -> float:
    """Expected compute lost in one try at an interval of `length_s`, the write at its end.

    The integral of lost(x) exp(-x/M)/M, by parts; no failure loses nothing.
    """
    computing = length_s - cost_s
    at_end = already_s + computing + overlap * cost_s
    before = -math.expm1(-computing / mtbf_s)
    during = math.exp(-computing / mtbf_s) * -math.expm1(-cost_s / mtbf_s)
    gained = mtbf_s * (before + overlap * during)
    return already_s + gained - at_end * math.exp(-length_s / mtbf_s)


def document(
    mtbf_s: float, cost_s: float, restart_s: float = 0.0, overlap: float | None = None
) -> dict[str, Any]:
    """What `plan interval --json` prints; seconds, and shares from 0 to 1.

    `efficiency_at` is null where an interval would be shorter than the write. With an overlap
    young_s and daly_s are those of the blocking part of the cost, and `overlapped` has the
    period from save to save, exact and by the published first order (`overlapped_period`).
    """
    check(mtbf=mtbf_s, cost=cost_s, restart=restart_s, overlap=overlap or 0.0)
    if cost_s < 1e-9:
        raise UsageError(f"cost: got {cost_s:g}: expected more; what is free is done all the time")
    w = overlap or 0.0
    blocking = (1 - w) * cost_s
    best = optimum(mtbf_s, cost_s, w)

    def at(times: float) -> float | None:
        possible = times * best >= w * cost_s
        return efficiency(times * best, mtbf_s, cost_s, restart_s, w) if possible else None

    made: dict[str, Any] = {
        "young_s": young(mtbf_s, blocking),
        "daly_s": daly(mtbf_s, blocking),
        "optimal_s": best,
        "efficiency": at(1.0),
        "efficiency_at": {"half": at(0.5), "double": at(2.0), "tenfold": at(10.0)},
        "checkpoint_overhead": blocking / (best + blocking),
        "lost_work_per_failure_s": lost_work_per_failure(best, mtbf_s, cost_s, restart_s, w),
        "definition": _definition(restart_s, overlap),
    }
    if overlap is not None:
        made["overlapped"] = _overlapped(best + blocking, mtbf_s, cost_s, restart_s, overlap)
    return made


def _overlapped(
    period_s: float, mtbf_s: float, cost_s: float, restart_s: float, overlap: float
) -> dict[str, float | None]:
    """From save to save: the exact optimum and, where there is one, the published first order."""
    made: dict[str, float | None] = {"period_s": period_s}
    made |= {"first_order_period_s": None, "first_order_waste": None}
    if mtbf_s > restart_s + overlap * cost_s:
        period = overlapped_period(mtbf_s, cost_s, restart_s, overlap)
        made["first_order_period_s"] = period
        made["first_order_waste"] = overlapped_waste(period, mtbf_s, cost_s, restart_s, overlap)
    return made


def _definition(restart_s: float, overlap: float | None) -> str:
    cost = "C" if overlap is None else "(1-w)C"
    again = "R/M" if overlap is None else "(R+wC)/M"
    beside = (
        "a checkpoint stops the run for C"
        if overlap is None
        else f"overlapped writes: during the C of a write the run goes on at w = {overlap:g} of its"
        " speed, and a failure before its end goes back to the checkpoint before"
    )
    return (
        f"seconds of compute between checkpoints (tau); {beside}; efficiency: compute over expected"
        f" run time, exact, tau / (M exp({again}) (exp((tau+{cost})/M) - 1)), failures at random at"
        f" any moment, restart R = {restart_s:g} s; checkpoint_overhead: {cost}/(tau+{cost});"
        " lost_work_per_failure_s: expected compute lost per failure, those during a restart lose"
        " none; the optimum is flat, see efficiency_at"
    )


def text(document: dict[str, Any]) -> str:
    """The document for a terminal."""
    names = ("the optimum", "half of it", "twice", "ten times")
    values = (document["efficiency"], *document["efficiency_at"].values())
    shares = [
        f"{'impossible' if x is None else f'{x:.2%}'} at {name}"
        for name, x in zip(names, values, strict=True)
    ]
    return "\n".join(
        [
            f"optimum     {document['optimal_s']:,.1f} s of compute between checkpoints",
            f"estimates   Young {document['young_s']:,.1f} s, Daly {document['daly_s']:,.1f} s",
            f"efficiency  {', '.join(shares)}",
            f"overhead    {document['checkpoint_overhead']:.2%} of the time without failures",
            f"lost        {document['lost_work_per_failure_s']:,.1f} s of compute per failure",
            "",
            textwrap.fill(document["definition"], 96),
        ]
    )
