"""Intervals and efficiencies against published numbers, and what must hold for any numbers."""

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxrel.exit_codes import UsageError
from jaxrel.plan import first_order, interval

pytestmark = pytest.mark.core

# M, C, then tau by Young 1974 and by Daly 2006, the optimum by Lambert's W and by a numeric search,
# the exact efficiency at Young's, Daly's and the optimum, and sqrt(2C/M), the first-order waste at
# Young's. Rows 2 to 4 have the M and C of figures 3 to 5 of Daly 2006; rows 6 and 7 have the M of
# table 5 of Llama 3 (arXiv 2407.21783: 419 unexpected interruptions in 54 days).
OPTIMA = [
    (10800, 120, 1609.9689437998486, 1530.9627517898487, 1530.982681483043, 1530.9826057531016,
     0.8580880239901709, 0.858242344296817, 0.858242344307125, 0.14907119849998599),
    (86400, 300, 7200.0, 7001.388888888888, 7001.404399599507, 7001.404650177842,
     0.9189360739991965, 0.9189652268563038, 0.9189652268564868, 0.08333333333333333),
    (21600, 300, 3600.0, 3402.7777777777774, 3402.840119925981, 3402.8401989985314,
     0.8422499443110911, 0.8424611055367077, 0.8424611055589821, 0.16666666666666666),
    (900, 300, 734.8469228349534, 548.4551991837487, 549.990169256142, 549.9901680845536,
     0.3784183668372386, 0.3888988843050375, 0.3888998119376199, 0.816496580927726),
    (492750.0, 120, 10874.741376235115, 10794.888506170866, 10794.888939709737, 10794.889619782985,
     0.9780919823284957, 0.9780925643029764, 0.9780925643029771, 0.022069490362729812),
    (11135.08353221957, 60, 1155.9455107687163, 1116.29154784077, 1116.2963677262665,
     1116.2964566873147, 0.8996946119526492, 0.8997496188954845, 0.8997496188963257,
     0.10381112161610342),
    (11135.08353221957, 20, 667.3854518108578, 654.1187133430911, 654.1192474906463,
     654.1192609027783, 0.9412448591077335, 0.9412560089380455, 0.9412560089380623,
     0.05993537900993429),
    (3600, 1800, 3600.0, 2500.0, 2513.84557433639, 2513.8456121451845,
     0.2872169167888683, 0.30170635362818543, 0.301709562684336, 1.0),
    (600, 1200, 1200.0, 600.0, 568.5185415253711, 568.5185353042999,
     0.0373147207275481, 0.05239569649125595, 0.052469097457714865, 2.0),
    (1800, 60, 464.75800154489, 425.6186645107138, 425.6487372398767, 425.6487501992232,
     0.7628260437534052, 0.763528478860524, 0.7635284793111805, 0.2581988897471611),
    (18000, 360, 3600.0, 3364.0, 3364.1079261639115, 3364.107933460404,
     0.8127546213841657, 0.8131051151349094, 0.8131051152131157, 0.2),
]  # fmt: skip

# work, tau, C, R, M, expected run time when restarts can fail and when not, efficiency of the
# first. Daly 2006, figures 3 to 5 (his tau of 117, 57 and 9.1 minutes); the rest by his formula.
RUN_TIMES = [
    (1800000, 7020, 300, 600, 86400, 1972374.979134574, 1972327.6395476453, 0.9126053712107991),
    (1800000, 3420, 300, 600, 21600, 2196783.444002651, 2195951.4521390507, 0.8193798095638906),
    (1800000, 546, 300, 600, 900, 9015118.749571677, 7714193.82690299, 0.19966459122743346),
    (36000, 1610, 120, 0, 10800, 41953.74363243227, 41953.74363243227, 0.8580879054657297),
    (36000, 1610, 120, 300, 10800, 43135.46217350337, 43119.12539999985, 0.8345801386153585),
    (2592000, 1610, 120, 600, 10800, 3193233.580108963, 3188484.516064853, 0.8117163793296803),
]

# M, C, w, downtime and restart together, period and waste by Aupy et al. (arXiv 1310.8456), and the
# waste of a simulation at that period.
OVERLAPPED = [
    (10800, 120, 0.0, 300, 1587.4507866387544, 0.16920840617025504, 0.1656333682605332),
    (10800, 120, 0.9, 300, 499.4076491204354, 0.08346367121485514, 0.08181892754326336),
    (10800, 120, 0.99, 300, 157.84448042297845, 0.053337451891016525, 0.051911509043583104),
    (86400, 300, 0.0, 660, 7172.447281088931, 0.08891721390149226, 0.08789867842245092),
    (86400, 300, 0.95, 660, 1601.1402187191484, 0.029382409938879032, 0.029058742720013298),
]


def same(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("row", OPTIMA, ids=lambda row: f"M={row[0]:.0f} C={row[1]}")
def test_optima(row: tuple[float, ...]) -> None:
    m, c, young, daly, exact, numeric, at_young, at_daly, at_exact, waste = row
    assert interval.young(m, c) == same(young)
    assert interval.daly(m, c) == same(daly)
    assert interval.optimum(m, c) == same(exact) == pytest.approx(numeric, rel=2e-7)
    assert interval.efficiency(young, m, c) == same(at_young)
    assert interval.efficiency(daly, m, c) == same(at_daly)
    assert interval.efficiency(exact, m, c) == same(at_exact)
    assert first_order.waste(young, m, c) == same(waste)


def test_the_first_order_says_something_else() -> None:
    young = interval.young(900, 300)
    assert 1 - first_order.waste(young, 900, 300) == same(0.1835034190722739)
    assert interval.efficiency(interval.optimum(900, 300), 900, 300) > 0.38


@pytest.mark.parametrize("row", RUN_TIMES)
def test_expected_run_times(row: tuple[float, ...]) -> None:
    work, tau, c, r, m, failing, safe, share = row
    assert interval.expected_run_time(work, tau, m, c, r) == same(failing)
    assert interval.expected_run_time(work, tau, m, c, r, restart_can_fail=False) == same(safe)
    assert interval.efficiency(tau, m, c, r) == same(share)


@pytest.mark.parametrize("row", OVERLAPPED)
def test_overlapped_writes(row: tuple[float, ...]) -> None:
    m, c, w, r, period, waste, simulated = row
    assert first_order.overlapped_period(m, c, r, w) == same(period)
    assert first_order.overlapped_waste(period, m, c, r, w) == same(waste)
    exact = interval.efficiency(period - (1 - w) * c, m, c, r, w)
    assert 1 - exact == pytest.approx(simulated, abs=5e-4)
    assert first_order.overlapped_period(m, c, r, 1.0) == c


def test_two_levels() -> None:
    """Derived, by hand: 0.9 of the failures have a local checkpoint of 2 s."""
    made = first_order.two_levels(10800, 0.9, (2.0, 120.0), (30.0, 600.0))
    assert made.local_s == same(219.08902300206645)
    assert made.remote_s == same(5091.168824543142)
    assert made.waste == same(0.07345342621816425)
    young = interval.young(10800, 120)
    assert first_order.waste(young, 10800, 120, 600) == same(0.2046267540555415)


@pytest.mark.parametrize(
    ("c", "m", "r", "expected"),
    [
        (120, 10800, 0, 1734.4348856488452),
        (120, 10800, 600, 1778.4329953302304),
        (300, 86400, 600, 7531.18247591637),
    ],
)
def test_the_availability_form(c: float, m: float, r: float, expected: float) -> None:
    """Saxena et al., arXiv 2410.18124."""
    assert first_order.availability_interval(m, c, r) == same(expected)


@pytest.mark.parametrize(
    ("gpus", "hours"),
    [
        (1024, 28.846153846153847),
        (2048, 14.423076923076923),
        (4096, 7.211538461538462),
        (8192, 3.605769230769231),
        (16384, 1.8028846153846154),
        (131072, 0.22536057692307693),
    ],
)
def test_time_between_failures_of_a_job(gpus: int, hours: float) -> None:
    """Kokolis et al., arXiv 2410.21680: 6.5 failures per 1000 node-days, 8 GPUs a node."""
    assert first_order.job_mtbf(gpus // 8, 6.5e-3) == same(3600 * hours)


@pytest.mark.parametrize(
    ("nodes", "r", "tau", "c", "expected"),
    [
        (256, 300, 3600, 60, 0.9438251366120219),
        (1024, 300, 1800, 30, 0.8926775956284153),
        (2048, 300, 600, 20, 0.878279569892473),
        (2048, 300, 3600, 60, 0.6653551912568306),
        (16384, 120, 300, 5, 0.6562622950819673),
    ],
)
def test_effective_training_time(
    nodes: int, r: float, tau: float, c: float, expected: float
) -> None:
    """Kokolis et al., arXiv 2410.21680: 6.5 failures per 1000 node-days."""
    m = first_order.job_mtbf(nodes, 6.5e-3)
    assert first_order.effective_training_time(tau, m, c, r) == same(expected)


MTBF = st.floats(1.0, 1e8)
RATIO = st.floats(-9.0, 1.0).map(lambda power: 10.0**power)
"""Of C to M."""
OVERLAP = st.one_of(st.just(0.0), st.floats(0.0, 1.0))


@given(MTBF, RATIO, OVERLAP, st.floats(0.0, 3.0), st.floats(-3.0, 3.0))
def test_no_interval_beats_the_optimum(
    m: float, ratio: float, w: float, restart: float, power: float
) -> None:
    c, r = ratio * m, restart * m
    best = interval.optimum(m, c, w)
    other = max(best * 10.0**power, w * c)
    at_best = interval.efficiency(best, m, c, r, w)
    assert 0 <= interval.efficiency(other, m, c, r, w) <= at_best * (1 + 1e-12) <= 1
    # Neither do its neighbours: the optimum is where it is said to be, whatever R.
    for near in (best * 0.97, best * 1.03):
        if near >= w * c and w < 0.999:
            assert interval.efficiency(near, m, c, r, w) < at_best


@given(MTBF, RATIO, OVERLAP, st.floats(1.001, 100.0))
def test_fewer_failures_mean_longer_intervals_and_more_done(
    m: float, ratio: float, w: float, better: float
) -> None:
    c = ratio * m
    rare, often = interval.optimum(m * better, c, w), interval.optimum(m, c, w)
    assert rare >= often
    assert rare > often or often == w * c
    assert interval.efficiency(rare, m * better, c, m, w) > interval.efficiency(often, m, c, m, w)


@given(MTBF, st.floats(-9.0, 0.0))
@example(1.0, -6.000001)  # the end of the series
def test_the_optimum_solves_its_equation(m: float, power: float) -> None:
    """log((tau/M - 1) exp(tau/M - 1)) = log(-exp(-1 - C/M)), signs aside."""
    ratio = interval.optimum(m, m * 10.0**power) / m
    assert -math.log1p(-ratio) - ratio == pytest.approx(10.0**power, rel=1e-8, abs=0)


@given(MTBF, st.floats(-15.0, -4.0))
def test_tiny_costs_keep_their_digits(m: float, power: float) -> None:
    c = m * 10.0**power
    assert interval.optimum(m, c) == pytest.approx(interval.daly(m, c), rel=1e-6, abs=0)


@given(MTBF, st.floats(1e-3, 10.0), st.floats(0.0, 5.0), st.floats(0.0, 2.0))
def test_all_compute_is_useful_or_lost(m: float, tau: float, ratio: float, restart: float) -> None:
    """A run fails once in M, and tries an interval exp((tau+C)/M) times on average."""
    tau, c, r = tau * m, ratio * m, restart * m
    failures = interval.expected_run_time(tau, tau, m, c, r) / m
    lost = failures * interval.lost_work_per_failure(tau, m, c, r)
    computed = math.exp((tau + c) / m) * m * -math.expm1(-tau / m)
    assert tau + lost == pytest.approx(computed, rel=1e-9)


@given(MTBF, st.floats(1e-3, 10.0), st.floats(0.0, 5.0), st.floats(0.0, 2.0), OVERLAP)
def test_no_more_is_lost_than_is_at_risk(
    m: float, tau: float, ratio: float, restart: float, w: float
) -> None:
    c = ratio * m
    tau = max(tau * m, w * c)
    loss = interval.lost_work_per_failure(tau, m, c, restart * m, w)
    assert 0 < loss < tau + w * c
    assert interval.lost_work_per_failure(tau, m, c, restart * m + m, w) < loss


def test_the_document() -> None:
    made = interval.document(10800, 120)
    assert made["young_s"] == same(1609.9689437998486)
    assert made["daly_s"] == same(1530.9627517898487)
    assert made["optimal_s"] == same(1530.982681483043)
    assert made["efficiency"] == same(0.858242344307125)
    assert made["checkpoint_overhead"] == same(120 / (1530.982681483043 + 120))
    for times, name in ((0.5, "half"), (2, "double"), (10, "tenfold")):
        expected = interval.efficiency(times * 1530.982681483043, 10800, 120)
        assert made["efficiency_at"][name] == same(expected)
    assert made["lost_work_per_failure_s"] == same(800.4163682213301)
    assert "checkpoint_overhead: C/(tau+C)" in made["definition"]
    assert "flat" in made["definition"]
    assert "overlap" not in made["definition"] and "overlapped" not in made


def test_a_restart_counts_in_the_efficiency_and_not_in_the_interval() -> None:
    without, made = interval.document(10800, 120), interval.document(10800, 120, 600)
    assert made["optimal_s"] == without["optimal_s"]
    assert made["efficiency"] == same(without["efficiency"] * math.exp(-600 / 10800))
    lost = without["lost_work_per_failure_s"] * math.exp(-600 / 10800)
    assert made["lost_work_per_failure_s"] == same(lost)
    assert "R = 600 s" in made["definition"]


def test_the_document_of_overlapped_writes() -> None:
    made = interval.document(10800, 120, 300, 0.9)
    blocking = interval.document(10800, 12, 408)  # the same to efficiency and optimum
    for name in ("young_s", "daly_s", "optimal_s", "efficiency", "checkpoint_overhead"):
        assert made[name] == same(blocking[name])
    assert made["overlapped"] == {
        "period_s": same(made["optimal_s"] + 12),
        "first_order_period_s": same(499.4076491204354),
        "first_order_waste": same(0.08346367121485514),
    }
    assert "overlapped" in made["definition"] and "(1-w)C/(tau+(1-w)C)" in made["definition"]
    # Half of the optimum is shorter than the write, and M below R + w C has no first order.
    assert interval.document(10800, 120, 300, 0.99)["efficiency_at"]["half"] is None
    assert interval.document(60, 120, 0, 0.9)["overlapped"]["first_order_period_s"] is None
    plain, none = interval.document(10800, 120, 300), interval.document(10800, 120, 300, 0.0)
    assert none["optimal_s"] == plain["optimal_s"] and none["efficiency"] == plain["efficiency"]


def test_the_text() -> None:
    shown = interval.text(interval.document(10800, 120, 300, 0.99))
    assert "160.2 s" in shown and "94.77% at the optimum, impossible at half" in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interval.young(0, 1), "mtbf: got 0: expected 1e-09 to 1e\\+12 seconds"),
        (lambda: interval.young(math.nan, 1), "mtbf: got nan: "),
        (lambda: interval.daly(1, -1), "cost: got -1: expected 0 to 1e\\+12 seconds"),
        (lambda: interval.optimum(math.inf, 1), "mtbf: got inf: "),
        (lambda: interval.optimum(1, 1, 1.5), "overlap: got 1.5: expected 0 to 1$"),
        (lambda: interval.efficiency(0, 1, 1), "interval: got 0: "),
        (lambda: interval.efficiency(1, 1, 1, -1), "restart: got -1: "),
        (lambda: interval.efficiency(5, 100, 10, 0, 0.6), "interval: got 5: expected at least 6 s"),
        (lambda: interval.lost_work_per_failure(5, 100, 10, 0, 0.6), "interval: got 5: "),
        (lambda: interval.expected_run_time(0, 1, 1, 1), "work: got 0: "),
        (lambda: interval.document(10800, 0), "cost: got 0: expected more"),
        (lambda: interval.document(10800, -1), "cost: got -1: expected 0"),
        (lambda: interval.document(10800, 5e-324), "cost: got 4.94066e-324: expected more"),
        (lambda: interval.document(10800, 120, 0, -0.1), "overlap: got -0.1: "),
        (lambda: first_order.overlapped_period(100, 10, 95, 0.5), "mtbf: got 100: expected more"),
        (lambda: first_order.two_levels(9, 1.0, (1, 1), (1, 1)), "local share: got 1: "),
        (lambda: first_order.job_mtbf(0, 1), "nodes: got 0: "),
        (lambda: first_order.job_mtbf(1, math.inf), "failures per node-day: got inf: "),
    ],
)
def test_wrong_inputs(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        call()


def test_hopeless_odds_are_numbers_too() -> None:
    assert interval.efficiency(1e9, 1e-9, 1e12, 1e12) == 0
    assert interval.expected_run_time(1, 1e9, 1e-9, 1e12) == math.inf
    made = interval.document(1e-9, 1e12, 1e12)
    assert made["efficiency"] == 0 and made["lost_work_per_failure_s"] == 0
    assert interval.document(1e12, 1e-9)["efficiency"] == pytest.approx(1)


def test_the_room_never_imports_jax() -> None:
    rooms = "auto_interval, first_order, interval, memory, quantities"
    code = f"import sys; from jaxrel.plan import {rooms}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
