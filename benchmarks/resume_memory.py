"""Peak memory of a process that resumes, beside one that starts cold, at the same work.

    python -m benchmarks.resume_memory --out benchmarks/results/NAME.json

Two `jaxrel train` processes on one run directory, each with two steps and a save at the end: the
first begins from nothing, the second restores what the first saved. A resume that holds an
initialised state beside the restored one would need about a state more. The figure is the
highest resident memory that the kernel saw (`ru_maxrss`), so it does not depend on the load.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.step_overhead import about_this_run
from jaxrel.checkpoint.listing import list_checkpoints

BAR = 1.3
MODEL = {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 12, "mlp": 3072}
QUICK = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 2, "mlp": 128}


def train(run: Path, steps: int, model: dict[str, int]) -> float:
    """Peak resident memory, in MB, of a process that trains up to `steps`."""
    values = {f"model.{name}": value for name, value in model.items()} | {
        "run.dir": run,
        "run.steps": steps,
        "mesh.cpu_devices": 8,
        "batch.sequence": 32,
        "batch.global_size": 8,
        "optimizer.warmup_steps": 0,
        "checkpoint.interval": 1000,
        "checkpoint.verify_mb_s": 0,
        "evaluation.every": 0,
    }
    command = [sys.executable, "-m", "jaxrel", "train", "scripts/configs/tiny.yaml"]
    command += [word for key, value in values.items() for word in (f"--{key}", str(value))]
    process = subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return used.ru_maxrss / 1024


def compare(model: dict[str, int], rounds: int) -> dict[str, Any]:
    """Both peaks of each round, and the state's size."""
    found: list[dict[str, float]] = []
    size = 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="resume-") as folder:
            run = Path(folder, "run")
            cold = train(run, 2, model)
            size = max(row["bytes"] for row in list_checkpoints(run / "checkpoints")["checkpoints"])
            found.append({"cold_mb": cold, "resumed_mb": train(run, 4, model)})
    ratios = [one["resumed_mb"] / one["cold_mb"] for one in found]
    met = "met" if max(ratios) <= BAR else "not met"
    print(f"checkpoint {size / 1e6:.0f} MB; resumed / cold: {ratios}; bar {BAR}: {met}")
    return {"checkpoint_bytes": size, "rounds": found, "ratios": ratios, "bar": BAR, "verdict": met}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume_memory")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tiny smoke, not a measurement")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = compare(QUICK if given.quick else MODEL, 1 if given.quick else given.rounds)
    found |= about_this_run([*parser.prog.split(), *sys.argv[1:]])
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
