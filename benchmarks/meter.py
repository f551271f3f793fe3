"""What measuring a step costs the loop: CPU time of the meter's calls, and what it adds besides.

    python -m benchmarks.meter --out benchmarks/results/NAME.json

The meter runs on the host alone: it knows no JAX, so it adds no FLOP, no pass over an array and
no wait for a device (tests/throughput/test_meter.py holds it to that). What is left is Python, the
calls that `train/loop.py` makes for one step without a save. Sampled steps are another matter:
their cost is in each `StepSampled`.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.step_overhead import about_this_run
from jaxrel.plan.peaks import Peak
from jaxrel.throughput.meter import StepFlops, ThroughputMeter

STEPS = 20_000


def cost(steps: int) -> list[float]:
    """CPU microseconds a step, of each of ten rounds."""
    meter = ThroughputMeter(1024, 8, Peak(1e12, "made up"), StepFlops(1e9, 1e9, "made up"))
    found = []
    for _ in range(10):
        began = time.process_time()
        for _ in range(steps // 10):
            meter.timer.turn_to("data", busy=True)
            meter.timer.turn_to("dispatch", busy=True)
            meter.timer.turn_to("compute", busy=True)
            meter.completed()
        found.append((time.process_time() - began) / (steps // 10) * 1e6)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.meter")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rounds = sorted(cost(STEPS))
    found: dict[str, Any] = {"cpu_us_a_step": rounds, "median_us": rounds[len(rounds) // 2]}
    print(f"{found['median_us']:.1f} us of CPU a step ({rounds[0]:.1f} to {rounds[-1]:.1f})")
    if given.out:
        found |= about_this_run([*parser.prog.split(), *sys.argv[1:]])
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
