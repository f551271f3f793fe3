"""Formulas against runs that fail: simulated event by event, with none of the formulas."""

import math

import numpy as np
import pytest

from jaxrel.plan import interval

RUNS = 1000
INTERVALS = 20


def simulate(
    rng: np.random.Generator, tau: float, m: float, c: float, r: float, w: float
) -> tuple[float, float, int]:
    """Seconds, compute lost and failures until INTERVALS more checkpoints are whole.

    It begins as the write of a checkpoint ends, with the work done beside that write.
    """
    clock, failure, lost, failures = 0.0, rng.exponential(m), 0.0, 0
    work = w * c  # since the checkpoint that a failure goes back to
    for _ in range(INTERVALS):
        restarting = False
        while True:
            stages = [(r, 0.0)] if restarting else []
            # From one write to the next it is tau of work, of which w c was beside the first.
            stages += [(tau - work, 1.0), (c, w)]
            for seconds, speed in stages:
                done = min(seconds, failure - clock)
                work += done * speed
                clock += done
                if clock == failure or done < seconds:
                    break
            else:
                break
            lost, failures, restarting, work = lost + work, failures + 1, True, 0.0
            clock, failure = failure, failure + rng.exponential(m)
        work = w * c
    return clock, lost, failures


@pytest.mark.parametrize(
    ("tau", "m", "c", "r", "w"),
    [
        (1530.0, 10800.0, 120.0, 0.0, 0.0),
        (1530.0, 10800.0, 120.0, 600.0, 0.0),
        (550.0, 900.0, 300.0, 400.0, 0.0),  # failures hit restarts and checkpoints
        (3000.0, 900.0, 10.0, 100.0, 0.0),  # far from the optimum
        (501.0, 1800.0, 240.0, 300.0, 0.9),
        (250.0, 600.0, 400.0, 200.0, 0.5),
        (130.0, 300.0, 120.0, 60.0, 1.0),
    ],
)
def test_formulas(tau: float, m: float, c: float, r: float, w: float) -> None:
    rng = np.random.default_rng(1234)
    runs = np.array([simulate(rng, tau, m, c, r, w) for _ in range(RUNS)])
    seconds, lost, failures = runs.T

    def error(samples: np.ndarray) -> float:
        return 4 * float(samples.std(ddof=1)) / math.sqrt(RUNS)

    work = INTERVALS * tau
    expected = interval.expected_run_time(work, tau, m, c, r, w)
    assert abs(seconds.mean() - expected) < error(seconds) < 0.2 * expected
    share = interval.efficiency(tau, m, c, r, w)
    assert abs((work - share * seconds).mean()) < error(share * seconds)
    loss = interval.lost_work_per_failure(tau, m, c, r, w)
    assert abs((lost - loss * failures).mean()) < error(lost - loss * failures)
    assert abs((seconds / m - failures).mean()) < error(seconds / m - failures)


def test_restarts_that_cannot_fail() -> None:
    """The clock of failures stands still during a restart."""
    rng = np.random.default_rng(99)
    tau, m, c, r = 550.0, 900.0, 300.0, 400.0
    plain = np.array([simulate(rng, tau, m, c, 0.0, 0.0) for _ in range(RUNS)])
    seconds = plain[:, 0] + r * plain[:, 2]
    expected = interval.expected_run_time(INTERVALS * tau, tau, m, c, r, restart_can_fail=False)
    assert abs(seconds.mean() - expected) < 4 * seconds.std(ddof=1) / math.sqrt(RUNS)
