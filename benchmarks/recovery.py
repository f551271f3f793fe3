"""How long a job is down when a process dies: SIGKILL to the next new step, part by part.

    python -m benchmarks.recovery --rounds 10 --out benchmarks/results/NAME.json
    python -m benchmarks.recovery --quick

A job of two processes with four simulated devices each. Arms, interleaved in a new random
order each round: a plain start by `jaxrel launch` from a checkpoint, the same again as a
control, the recovery of such a job, the shell loop around a bare Orbax script
(`bare_restart`) with a process killed, and the ablations that were asked for. Everything is
compiled beforehand. See benchmarks/README.md for how the figures are judged.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import marks, restarts
from benchmarks.restarts import Arm, Measured
from benchmarks.step_overhead import about_this_run
from benchmarks.verdict import Ratio, paired_ratio, verdict

CONFIG = Path(__file__).parent.parent / "scripts" / "configs" / "tiny.yaml"
FLAGS = ("--run.steps", "1000", "--checkpoint.interval", "1000000")
"""Of every job: it is stopped long before it ends, and saves only when it is prepared."""
QUICK = (
    "--model.layers", "1", "--model.hidden", "16", "--model.heads", "2", "--model.kv_heads", "1",
    "--model.head_dim", "8", "--model.mlp", "16", "--model.remat", "none",
    "--batch.reduction", "fast", "--batch.sequence", "8", "--batch.global_size", "8",
)  # fmt: skip
BAR = 1.1
"""Highest ratio of a recovery to a plain start."""
LEAST = 6
"""Rounds that a verdict takes: all of fewer fall on one side too often by chance."""
PLAIN, AGAIN, RECOVERY, LOOP = "plain start", "plain start again", "recovery", "shell loop"

ABLATIONS = {
    "no settling, no stacks": Arm(
        launcher="from functools import partial\n"
        "from jaxrel.supervise import launch\n"
        "launch.Policy = partial(launch.Policy, settle_s=0.0, dump_s=0.0)"
    ),
    "restore not verified": Arm(
        worker="from jaxrel.checkpoint import restoring\nrestoring._verify = lambda *_: None"
    ),
    "step without a digest": Arm(
        worker="from benchmarks.ablations import _no_digest\n"
        "from jaxrel.train import step\n"
        "step.sharded_tree_words = _no_digest"
    ),
}
"""Recoveries with a part taken out, from outside."""

Measure = Callable[[Path, int], Measured]
"""Measures in an empty folder; a rank is killed where there is a kill."""


def arms(
    prepared: Path, flags: Sequence[str], ablations: Sequence[str], limit_s: float
) -> dict[str, Measure]:
    """What is measured, by name."""
    own = Arm(tuple(flags))

    def plain(folder: Path, rank: int) -> Measured:
        return restarts.start(own, CONFIG, prepared, folder)

    def recovery(arm: Arm) -> Measure:
        return lambda folder, rank: restarts.recover(arm, CONFIG, prepared, folder, rank)

    def loop(folder: Path, rank: int) -> Measured:
        return restarts.loop(prepared, folder, rank, limit_s)

    found = {PLAIN: plain, AGAIN: plain, RECOVERY: recovery(own), LOOP: loop}
    for name in ablations:
        arm = ABLATIONS[name]
        found[name] = recovery(Arm((*flags, *arm.flags), arm.launcher, arm.worker))
    return found


def interleave(arms: dict[str, Measure], rounds: int, loop_rounds: int) -> list[dict[str, Any]]:
    """Rounds of all arms in random order; the shell loop takes part in the first ones only.

    The rank that is killed changes from round to round: a job that loses its coordinator ends
    otherwise than one that loses another process.
    """
    order, found = np.random.default_rng(0), []
    for number in range(rounds):
        names = [name for name in arms if name != LOOP or number < loop_rounds]
        measured: dict[str, Any] = {}
        for name in order.permutation(names):
            with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
                one = arms[name](Path(folder), (number + 1) % restarts.PROCESSES)
            measured[str(name)] = asdict(one)
            took, cpu = marks.whole(one.wall_s), marks.whole(one.cpu_s)
            facts = {**one.facts, "not in the cache": one.compiled}
            told = "; ".join(f"{key} {value}" for key, value in facts.items())
            print(f"  {number + 1}: {name:24} {took:7.2f} s, CPU {cpu:6.2f} s  {told}", flush=True)
        found.append(measured)
    return found


def judge(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians by part, ratios with their intervals, and the verdict, of wall and of CPU time."""
    result: dict[str, Any] = {}
    for clock in ("wall_s", "cpu_s"):
        parts = _by_arm(rounds, clock)
        totals = {
            name: {number: marks.whole(one) for number, one in ones.items()}
            for name, ones in parts.items()
        }
        workers = {n: totals[PLAIN][n] - one["launch"] for n, one in parts[PLAIN].items()}
        control = _paired(totals[AGAIN], totals[PLAIN])
        ratio = _paired(totals[RECOVERY], totals[PLAIN])
        judged = verdict(ratio, control, BAR) if len(rounds) >= LEAST else "undecided"
        result[clock] = {
            "median_s": {name: _medians(list(ones.values())) for name, ones in parts.items()},
            "total_s": {name: float(np.median(list(t.values()))) for name, t in totals.items()},
            "control": asdict(control),
            "recovery": asdict(ratio) | {"bar": BAR, "verdict": judged},
            "recovery / start without launch": asdict(_paired(totals[RECOVERY], workers)),
        } | {
            f"{name} / recovery": asdict(_paired(total, totals[RECOVERY]))
            for name, total in totals.items()
            if name not in (PLAIN, AGAIN, RECOVERY)
        }
    return result


def _by_arm(rounds: Sequence[dict[str, Any]], clock: str) -> dict[str, dict[int, dict[str, float]]]:
    """Name of an arm -> round -> seconds by part; the shell loop is an arm for each rank."""
    found: dict[str, dict[int, dict[str, float]]] = {PLAIN: {}, AGAIN: {}, RECOVERY: {}}
    for number, measured in enumerate(rounds):
        for name, one in sorted(measured.items()):
            if name == LOOP:
                name = f"{LOOP}, rank {one['facts']['killed']}"
            found.setdefault(name, {})[number] = one[clock]
    return found


def _paired(over: dict[int, float], under: dict[int, float]) -> Ratio:
    """Of the rounds that `over` took part in."""
    return paired_ratio(list(over.values()), [under[number] for number in over])


def _medians(ones: Sequence[dict[str, float]]) -> dict[str, float]:
    """By part, in the order in which they happen."""
    return {p: float(np.median([one[p] for one in ones])) for p in marks.PARTS if p in ones[0]}


def show(judged: dict[str, Any]) -> None:
    """The table, and what may be said of it."""
    names = list(judged["wall_s"]["median_s"])
    print("\nmedian seconds, wall / CPU of all processes of the job")
    print(" " * 12 + "".join(f"{name[:22]:>24}" for name in names))
    for part in (*marks.PARTS, "total"):
        cells = []
        for name in names:
            wall, cpu = (_cell(judged[clock], name, part) for clock in ("wall_s", "cpu_s"))
            cells.append(" " * 24 if wall is None else f"{wall:>14.3f} / {cpu:7.3f}")
        print(f"{part:12}" + "".join(cells))
    print(f"total: all parts but {marks.REWORK}, the steps that were done before")
    print("[95% interval], which says nothing of a ratio that was taken in less than a few rounds")
    for clock in ("wall_s", "cpu_s"):
        one = judged[clock]
        bar, control = one["recovery"], one["control"]
        print(
            f"{clock[:-2]:4} recovery / plain start {_ratio(bar)}, bar {BAR}: {bar['verdict']}"
            f"  (A/A {_ratio(control)})"
        )
        for name, ratio in one.items():
            if " / " in name:
                print(f"{clock[:-2]:4} {name} {_ratio(ratio)}")


def _cell(judged: dict[str, Any], name: str, part: str) -> float | None:
    if part == "total":
        return judged["total_s"][name]
    return judged["median_s"][name].get(part)


def _ratio(found: dict[str, Any]) -> Ratio:
    return Ratio(found["median"], found["low"], found["high"])


def main(args: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--baseline-rounds", type=int, default=2, help="with the shell loop")
    parser.add_argument(
        "--baseline-limit",
        type=float,
        default=150.0,
        help="seconds after which the baseline's survivor is ended from outside",
    )
    parser.add_argument("--ablations", nargs="*", choices=list(ABLATIONS), default=[])
    parser.add_argument("--quick", action="store_true", help="a tiny smoke, not a measurement")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(args)
    rounds, loop_rounds = (1, 0) if given.quick else (given.rounds, given.baseline_rounds)
    flags = (*FLAGS, *(QUICK if given.quick else ()))
    result = about_this_run([*parser.prog.split(), *(sys.argv[1:] if args is None else args)])
    result |= {"processes": restarts.PROCESSES, "devices": restarts.DEVICES, "flags": flags}
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        prepared = Path(folder)
        print("compiling everything once", flush=True)
        restarts.prepare(CONFIG, flags, prepared)
        if loop_rounds:
            restarts.prepare_loop(prepared)
        measures = arms(prepared, flags, given.ablations, given.baseline_limit)
        interleave({name: measures[name] for name in given.ablations}, 1, 0)  # compiles them
        result["rounds"] = interleave(measures, rounds, loop_rounds)
    result |= judge(result["rounds"]) | {"load_average_after": list(os.getloadavg())}
    show(result)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
