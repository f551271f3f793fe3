"""What a checkpoint costs beside plain Orbax: time, memory, bytes, and the steps meanwhile.

    python -m benchmarks.checkpoint --out benchmarks/results/NAME.json
    python -m benchmarks.checkpoint --rss 200
    python -m benchmarks.checkpoint --quick

A state of at least a gigabyte on eight simulated devices, saved and restored by jaxrel and by
Orbax's own manager with its defaults. Arms, interleaved in a new random order each round: plain,
the same again as a control, jaxrel, and both with parts taken out. See benchmarks/README.md for
how the figures are judged.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import checkpoint_arms as arms
from benchmarks import checkpoint_memory as memory
from benchmarks.checkpoint_arms import (
    AGAIN,
    GIVEN,
    NO_SAVE,
    OURS,
    PLAIN,
    UNCOMPRESSED,
    UNREAD,
    UNVERIFIED,
)
from benchmarks.step_overhead import about_this_run
from benchmarks.verdict import Ratio, paired_ratio, verdict
from jaxrel.mesh.join import use_cpu_devices

LEAST = 6
"""Rounds that a verdict takes: all of fewer fall on one side too often by chance."""
_COMPARED = (PLAIN, AGAIN, OURS)
TASKS: dict[str, tuple[str, ...]] = {
    "save": (*_COMPARED, UNCOMPRESSED, GIVEN),
    "restore": (*_COMPARED, UNCOMPRESSED, UNVERIFIED),
    "step": (NO_SAVE, *_COMPARED, UNCOMPRESSED, UNREAD),
    "save memory": (*_COMPARED, UNCOMPRESSED, GIVEN),
    "restore memory": (*_COMPARED, UNVERIFIED),
}
"""The arms of what is measured."""
SELDOM = {
    (task, arm)
    for task, arms_ in TASKS.items()
    for arm in arms_
    if arm in (UNCOMPRESSED, UNVERIFIED)
} | {("save memory", GIVEN)}
"""Ablations that take part in the first rounds only."""
SELDOM_ROUNDS = 2


@dataclass(frozen=True)
class Figure:
    """One row of the table: `key` of what `task` measures, and its highest ratio allowed."""

    name: str
    task: str
    key: str
    bar: float | None
    unit: str


FIGURES = (
    Figure("blocking of a save", "save", "blocking_s", 1.1, "s"),
    Figure("save to commit", "save", "commit_s", 1.1, "s"),
    Figure("restore", "restore", "restore_s", 1.2, "s"),
    Figure("peak memory of a save", "save memory", "peak_mb", 1.1, "MB"),
    Figure("peak memory of a restore", "restore memory", "peak_mb", 1.1, "MB"),
    Figure("step during a save", "step", "step_s", 1.05, "s"),
    Figure("blocking of a save, CPU", "save", "blocking_cpu_s", None, "s"),
    Figure("save to commit, CPU", "save", "commit_cpu_s", None, "s"),
    Figure("restore, CPU", "restore", "restore_cpu_s", None, "s"),
    Figure("memory that a save adds", "save memory", "added_mb", None, "MB"),
    Figure("memory that a restore adds", "restore memory", "added_mb", None, "MB"),
)

Measured = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Of a round: task -> arm -> key -> value."""


def measures(size: arms.Size, quick: bool, stored: Path) -> dict[str, Callable[..., Any]]:
    """How each task is measured, in an empty folder and for an arm.

    `stored` gets a checkpoint of each format, for all restores.
    """
    state, step = arms.make_state(size), arms.make_step(quick)
    wanted, shape, idle_s = arms.abstract(state), (size.hidden, size.layers), 0.1 if quick else 1.0
    for arm in (PLAIN, UNCOMPRESSED, OURS):
        with arms.opened(_stored(stored, arm), arm, state) as way:
            way.save(state)
            way.wait()
    return {
        "save": lambda folder, arm: arms.save(folder, arm, state),
        "restore": lambda _, arm: arms.restore(_stored(stored, arm), arm, wanted),
        "step": lambda folder, arm: arms.steps_during(folder, arm, state, step, idle_s),
        "save memory": lambda _, arm: memory.in_fresh_process("save_peak", arm, *shape),
        "restore memory": lambda _, arm: memory.in_fresh_process(
            "restore_peak", arm, *shape, str(_stored(stored, arm))
        ),
    }


def _stored(stored: Path, arm: str) -> Path:
    """Where the checkpoint is that an arm restores."""
    name = UNCOMPRESSED if arm == UNCOMPRESSED else PLAIN if arm.startswith("plain") else OURS
    return stored / name.replace(", ", "-")


def interleave(
    measures: Mapping[str, Callable[[Path, str], Any]], rounds: int, limit_s: float = float("inf")
) -> list[Any]:
    """Rounds of all tasks and arms in random order; no new one begins after `limit_s`."""
    order, found, began = np.random.default_rng(0), [], time.monotonic()
    for number in range(rounds):
        if time.monotonic() - began > limit_s:
            break
        one: dict[str, dict[str, Any]] = {task: {} for task in measures}
        pairs = [(task, arm) for task in measures for arm in TASKS[task]]
        pairs = [pair for pair in pairs if number < SELDOM_ROUNDS or pair not in SELDOM]
        for n in order.permutation(len(pairs)):
            task, arm = pairs[n]
            with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
                one[task][arm] = measures[task](Path(folder), arm)
        found.append(one)
        print(f"  round {number + 1}: {time.monotonic() - began:.0f} s so far", flush=True)
    return found


def with_lost(one: Measured) -> dict[str, Any]:
    """A round with `lost_s` of each save under way: its blocking, and what steps took longer."""
    idle = one["step"][NO_SAVE]["step_s"]
    steps = {
        arm: {**x, "lost_s": x["blocking_s"] + x["steps"] * (x["step_s"] - idle)}
        for arm, x in one["step"].items()
        if arm != NO_SAVE
    }
    return {**one, "step": {NO_SAVE: one["step"][NO_SAVE], **steps}}


def judge(rounds: Sequence[Measured], state_bytes: int) -> dict[str, Any]:
    """Every figure with its ratios and verdicts, the structure, and steps during a reading."""
    rounds = [with_lost(one) for one in rounds]
    return {
        "figures": [_judged(figure, rounds) for figure in FIGURES],
        "structure": _structure(rounds, state_bytes),
        "step_s": _medians(rounds, "step", "step_s"),
        "lost_s": _medians(rounds, "step", "lost_s"),
        "readback_step_s": _medians(rounds, "step", "readback_step_s"),
    }


def _judged(figure: Figure, rounds: Sequence[Measured]) -> dict[str, Any]:
    series = {
        arm: {n: one[figure.task][arm][figure.key] for n, one in enumerate(rounds)
              if arm in one[figure.task]}
        for arm in TASKS[figure.task]
        if arm != NO_SAVE
    }  # fmt: skip
    base = series[PLAIN]
    ratios = {
        arm: paired_ratio(list(x.values()), [base[n] for n in x])
        for arm, x in series.items()
        if arm != PLAIN
    }
    found = asdict(figure) | {
        "median": {arm: float(np.median(list(x.values()))) for arm, x in series.items()},
        "rounds": {arm: len(x) for arm, x in series.items()},
        "control": asdict(ratios.pop(AGAIN)),
        "ratios": {arm: asdict(ratio) for arm, ratio in ratios.items()},
    }
    if figure.bar is not None:
        control = Ratio(**found["control"])
        found["verdicts"] = {
            arm: verdict(ratio, control, figure.bar) if len(series[arm]) >= LEAST else "undecided"
            for arm, ratio in ratios.items()
            if not arm.startswith("plain")
        }
    return found


def _structure(rounds: Sequence[Measured], state_bytes: int) -> dict[str, Any]:
    """Per byte of the state: on disk, written, read; and CPU seconds a gigabyte."""
    found: dict[str, Any] = {}
    keys = {
        "save": (("on disk", "disk_bytes"), ("written", "commit_written"),
                 ("read", "commit_read"), ("CPU s/GB", "commit_cpu_s")),
        "restore": (("read", "restore_read"), ("written", "restore_written"),
                    ("CPU s/GB", "restore_cpu_s")),
    }  # fmt: skip
    for task, columns in keys.items():
        found[task] = {arm: {} for arm in TASKS[task]}
        for name, key in columns:
            unit = 1e9 if key.endswith("_s") else 1.0
            for arm, value in _medians(rounds, task, key).items():
                found[task][arm][name] = value * unit / state_bytes
    return found


def _medians(rounds: Sequence[Measured], task: str, key: str) -> dict[str, float]:
    """Of the arms that have the key, over the rounds in which they have it."""
    values = {
        arm: [r[task][arm][key] for r in rounds if key in r[task].get(arm, ())]
        for arm in TASKS[task]
    }
    return {arm: float(np.median(x)) for arm, x in values.items() if x}


def show(judged: Mapping[str, Any], disk: Sequence[Mapping[str, float]]) -> None:
    """The tables."""
    for key in disk[0]:
        speeds = [one[key] / 1e6 for one in disk]
        name = key.removesuffix("_bytes_per_s").replace("_", " ")
        print(f"disk, {name}: {min(speeds):.0f} to {max(speeds):.0f} MB/s, a plain file")
    for figure in judged["figures"]:
        unit, bar = figure["unit"], figure["bar"]
        told = "" if bar is None else f", bar {bar}"
        control = Ratio(**figure["control"])
        print(
            f"{figure['name']}: {PLAIN} {figure['median'][PLAIN]:.4g} {unit}, A/A {control}{told}"
        )
        for arm, ratio in figure["ratios"].items():
            judgement = figure.get("verdicts", {}).get(arm, "")
            value = f"{figure['median'][arm]:.4g} {unit}"
            print(f"    {arm:22} {value:>12}  / plain {Ratio(**ratio)}  {judgement}")
    print(f"step without a save: {judged['step_s'][NO_SAVE]:.4f} s; lost by a save: its blocking,"
          " and what steps took longer until the commit; a step while it is read back")  # fmt: skip
    for arm, value in judged["lost_s"].items():
        read = judged["readback_step_s"].get(arm)
        told = "" if read is None else f", read back {read:.4f} s"
        print(f"    {arm:22} lost {value:.3f} s{told}")
    for task, by_arm in judged["structure"].items():
        print(f"{task}, per byte of the state")
        for arm, row in by_arm.items():
            print(f"    {arm:22}", ", ".join(f"{name} {value:.3f}" for name, value in row.items()))


def _about(parser: argparse.ArgumentParser, args: Sequence[str] | None) -> dict[str, Any]:
    told = about_this_run([*parser.prog.split(), *(sys.argv[1:] if args is None else args)])
    told["versions"] |= {n: metadata.version(n) for n in ("orbax-checkpoint", "tensorstore")}
    return told


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """All figures but those of growth, as JSON types; prints them as well."""
    size = arms.Size.of(given.gigabytes, given.quick)
    state_bytes = sum(
        x.size * x.dtype.itemsize
        for x in jax.tree.leaves(memory.abstract_state(size.hidden, size.layers))
    )
    print(f"{size}, {state_bytes / 1e6:.1f} MB on {arms.DEVICES} devices", flush=True)
    result: dict[str, Any] = {"size": asdict(size), "state_bytes": state_bytes}
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as stored:
        how = measures(size, given.quick, Path(stored))
        if not given.quick:  # the first of each pays for compilation
            interleave({t: how[t] for t in ("save", "restore", "step")}, 1)
        result["disk"] = [arms.disk_speed(Path(stored), state_bytes)]
        result["rounds"] = interleave(how, given.rounds, given.limit)
        result["disk"].append(arms.disk_speed(Path(stored), state_bytes))
    result |= judge(result["rounds"], state_bytes)
    show(result, result["disk"])
    return result


def main(args: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of state, at least")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all rounds")
    parser.add_argument("--rss", type=int, metavar="SAVES", help="memory after each save, instead")
    parser.add_argument("--quick", action="store_true", help="a tiny smoke, not a measurement")
    parser.add_argument("--out", type=Path, help="JSON file; what it holds of the other kind stays")
    given = parser.parse_args(args)
    use_cpu_devices(arms.DEVICES)
    if given.quick:
        given.rounds, given.gigabytes = 1, 0.001
    found: dict[str, Any] = {}
    if given.rss is None or given.quick:
        found["comparison"] = _about(parser, args) | compare(given)
    if given.rss is not None or given.quick:
        sizes = (given.rss or 4, *((1.0, 4.0) if given.quick else (50.0, 2000.0)))
        found["growth"] = _about(parser, args) | memory.growth(*sizes)
        memory.show_growth(found["growth"])
    for one in found.values():
        one["load_average_after"] = list(os.getloadavg())
    if given.out:
        old = json.loads(given.out.read_text()) if given.out.exists() else {}
        given.out.write_text(json.dumps(old | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
