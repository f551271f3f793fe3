"""A healthy job on a loaded machine: nothing is wrong with it, and nothing must be said to be.

Thousands of steps of a tiny model, with evaluation and saves between, run under supervision on
2 processes x 4 devices, with the shortest deadlines that the tests use, while other processes
keep every core busy. Counted are

- false alarms: failures that the supervisor recorded;
- false looks: processes that it asked for their stacks, because they seemed to be overdue.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxrel.events import FailureDetected, Record, StepCompleted
from jaxrel.ledger.reader import read
from jaxrel.ledger.summary import report
from scripts.campaigns.results import write_result
from scripts.campaigns.workers import ROOT, SMALL, Worker

HOG = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Uses a core for as long as the campaign lives."""
HOSTS, DEVICES = 2, 4


def command(run: Path, args: argparse.Namespace) -> list[str]:
    """The supervised job."""
    supervised = [sys.executable, "-m", "jaxrel.cli", "launch", "--dir", str(run)]
    supervised += ["--hosts", str(HOSTS), "--cpu-devices", str(DEVICES)]
    supervised += ["--hang-floor", str(args.floor), "--"]
    flags = {
        "run.steps": args.steps, "run.print_every": 100, "evaluation.every": args.evaluate,
        "evaluation.batches": 2, "checkpoint.interval": args.save, "checkpoint.keep": 3,
    }  # fmt: skip
    return supervised + Worker.command(run, {**SMALL, **flags})


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """While the block runs, `count` processes use a core each."""
    hogs = [subprocess.Popen([sys.executable, "-c", HOG]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def judge(run: Path, steps: int) -> dict[str, Any]:
    """What the run's own records say of it."""
    records, told = read(run).records, report(run)
    alarms = [r.event for r in records if isinstance(r.event, FailureDetected)]
    looks = [path.name for path in sorted(run.glob("stacks/*")) if path.stat().st_size]
    healthy = told["status"] == "finished" and told["steps"] == steps and not alarms and not looks
    return {
        "ok": healthy,
        "status": told["status"],
        "completed": told["steps"],
        "attempts": len(told["attempts"]),
        "false_alarms": [f"rank {a.rank}: {a.kind}: {a.detail}" for a in alarms],
        "false_looks": looks,
        "evaluations": len(told["evaluations"]),
        "checkpoints": len(told["checkpoints"]),
        "longest_between_steps_s": longest_s(records),
        "wall_s": told["wall_s"],
        "effective_training_time": told["effective_training_time"],
        "badput_s": told["badput_s"],
    }


def longest_s(records: Sequence[Record]) -> float | None:
    """Between two completed steps of an attempt, with what was done in between."""
    steps = [r for r in records if isinstance(r.event, StepCompleted)]
    gaps = (b.time_us - a.time_us for a, b in pairwise(steps) if a.attempt == b.attempt)
    longest = max(gaps, default=None)
    return None if longest is None else longest / 1e6


def main() -> int:
    """Run the campaign; exit 0 only if the run finished and nothing was said to be wrong."""
    parser = argparse.ArgumentParser(prog="scripts/campaign healthy", description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--evaluate", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--save", type=int, default=100, help="steps between saves")
    parser.add_argument("--floor", type=float, default=5.0, help="seconds; see --hang-floor")
    parser.add_argument("--hogs", type=int, default=os.cpu_count(), help="processes beside it")
    parser.add_argument("--dir", type=Path, help="where the run goes; default: a new folder")
    args = parser.parse_args()
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = args.dir or Path(tempfile.mkdtemp(prefix="healthy-", dir=ROOT / "runs"))
    run = folder / "run"
    environment = Worker.environment(folder / "compiled")
    before = os.getloadavg()
    with busy(args.hogs):
        code = subprocess.run(command(run, args), cwd=ROOT, env=environment, check=False).returncode
    asked = {name: value for name, value in vars(args).items() if name != "dir"}
    loads = {"load_before": before, "load_after": os.getloadavg()}
    found = judge(run, args.steps)
    alarms, looks = len(found["false_alarms"]), len(found["false_looks"])
    wrong = f"{alarms} false alarms, {looks} false looks"
    print(f"{found['completed']} healthy steps: {wrong}; exit {code}")
    print(f"written: {write_result('healthy', 0, asked | loads | {'exit': code} | found)}")
    return 0 if found["ok"] and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
