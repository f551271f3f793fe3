"""Exactness in full: 60 steps on every mesh, in every mode, in one process and in two.

    scripts/campaign exactness
    VENV=.venv-3.13 PYTHON=python3.13 scripts/campaign exactness     on another JAX

Every combination of remat and compute dtype runs on 1, 2, 4 and 8 devices (ZeRO, FSDP and
mixed meshes) and on 2 processes x 4; one combination also goes through the other checks of
scripts/check_exactness: tensor axis, recompilation, restart, another seed.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax

from scripts.campaigns.results import once, write_result
from scripts.campaigns.workers import ROOT

STEPS = 60
COMBINATIONS = [(r, d) for r in ("full", "none", "dots") for d in ("float32", "bfloat16")]


def main() -> int:
    """Run what is missing, write the result, return 0 when everything held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    scratch = Path(tempfile.gettempdir()) / f"jaxrel-exactness-jax{jax.__version__}"
    parser.add_argument("--dir", type=Path, default=scratch, help="where an unfinished one goes on")
    folder = parser.parse_args().dir
    outcomes = {}
    for remat, dtype in COMBINATIONS:
        name = f"{remat}-{dtype}"
        outcomes[name] = once(folder / name, partial(combination, remat, dtype))
        print(f"{name}: {'held' if outcomes[name]['held'] else 'DIFFERS'}", flush=True)
    held = all(outcome["held"] for outcome in outcomes.values())
    result = {"steps": STEPS, "held": held, "combinations": outcomes}
    print(f"{'held' if held else 'DIFFERS'}: {write_result('exactness', 0, result)}")
    return 0 if held else 1


def combination(remat: str, dtype: str, _: Path) -> dict[str, Any]:
    """One process with eight devices, and two with four each; all must end alike."""
    flags = ["--remat", remat, "--dtype", dtype]
    every = (remat, dtype) == COMBINATIONS[0]
    counts = [] if every else ["--checks", "counts"]
    alone = document(start(*flags, *counts, "--cpu-devices", "8"))
    job = ["--checks", "counts", "--cpu-devices", "4", "--coordinator"]
    job += [f"127.0.0.1:{_free_port()}", "--num-processes", "2", "--process-id"]
    first, second = (start(*flags, *job, str(process)) for process in range(2))
    pair = document(first)
    second.communicate()
    ends = {r["digest"] for r in alone["rows"] + pair["rows"] if r["what"] == "device counts"}
    held = alone["ok"] and pair["ok"] and second.returncode == 0 and len(ends) == 1
    return {"held": held, "one_process": alone["rows"], "two_processes": pair["rows"]}


def start(*flags: str) -> "subprocess.Popen[str]":
    """A process of scripts/check_exactness."""
    command = [sys.executable, str(ROOT / "scripts/check_exactness"), "--json"]
    command += ["--steps", str(STEPS), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def document(process: "subprocess.Popen[str]") -> Any:
    """What a process printed, once it has ended. (Gloo prints lines of its own on stdout.)"""
    out, _ = process.communicate()
    return json.loads(next(line for line in out.splitlines() if line.startswith("{")))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
