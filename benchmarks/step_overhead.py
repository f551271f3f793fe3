"""What the instruments of a training step cost, and what an exact sum costs.

    python -m benchmarks.step_overhead --mesh 1x8 --out benchmarks/results/NAME.json
    python -m benchmarks.step_overhead --quick

Arms, interleaved in a new random order each round: the bare step of a good user of plain
JAX (`bare_step`), the same executable again as a control, `fast` and `invariant`, and the
ablations that were asked for. See benchmarks/README.md for how the figures are judged.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks import bare_step
from benchmarks.ablations import ABLATIONS, ablated
from benchmarks.hlo import count
from benchmarks.verdict import Ratio, paired_ratio, verdict
from jaxrel.config import ModelConfig, OptimizerConfig
from jaxrel.mesh.build import build_mesh
from jaxrel.mesh.join import use_cpu_devices
from jaxrel.models import transformer
from jaxrel.train.step import TrainStep, make_train_step
from jaxrel.train.task import make_optimizer, make_schedule

BARS = (("fast", "bare", 1.05), ("invariant", "fast", 1.10))
"""(arm, what it is compared with, highest ratio allowed)."""
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Size:
    """Model and batch of a comparison."""

    hidden: int = 256
    layers: int = 4
    sequence: int = 64
    global_batch: int = 32
    groups: int = 8

    def model(self) -> ModelConfig:
        """The built-in transformer of this size, without dropout."""
        heads, kv_heads = max(4, self.hidden // 32), max(2, self.hidden // 64)
        return ModelConfig(
            hidden=self.hidden, layers=self.layers, heads=heads, kv_heads=kv_heads,
            head_dim=self.hidden // heads, mlp=3 * self.hidden, dropout=0.0,
        )  # fmt: skip


QUICK = Size(hidden=32, layers=2, sequence=16, global_batch=16)


@dataclass
class Arm:
    """A compiled step with its own state, and the seconds of its runs."""

    compiled: Any
    state: Any
    batch: Any
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self) -> float:
        """One update, waited for; its loss."""
        self.state, report = jax.block_until_ready(self.compiled(self.state, self.batch))
        return float(report[0] if isinstance(report, tuple) else report.loss)

    def timed(self) -> None:
        """One update; the CPU seconds are those of all threads of this process."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.run()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


def _optimizer() -> optax.GradientTransformation:
    config = OptimizerConfig()
    return make_optimizer(config, make_schedule(config, 100))


def make_arms(
    size: Size, data: int, fsdp: int, names: Sequence[str], quiet: bool = False
) -> tuple[dict[str, Arm], dict[str, Any]]:
    """The arms `names` (and bare twice) on a mesh, and the structure of each."""
    model, optimizer = size.model(), _optimizer()
    loss_fn = transformer.loss_fn(model)
    mesh = build_mesh({"data": data, "fsdp": fsdp, "tensor": 1}, jax.devices()[: data * fsdp])

    def make(reduction: Any) -> TrainStep:
        return make_train_step(
            transformer.init_fn(model), loss_fn, optimizer, mesh,
            groups=size.groups, reduction=reduction, clip_norm=CLIP_NORM,
            axes=transformer.logical_axes(model),
        )  # fmt: skip

    tokens = np.random.default_rng(0).integers(
        0, 256, (size.global_batch, size.sequence + 1), dtype=np.int32
    )
    fast, batch = make("fast"), {"tokens": tokens}
    arms: dict[str, Arm] = {}
    structure: dict[str, Any] = {}
    for name in ("bare", *names):
        with ablated(name) if name in ABLATIONS else nullcontext():
            if name == "bare":
                jitted = bare_step.make_bare_step(fast, loss_fn, optimizer, CLIP_NORM)
                placed = bare_step.place(fast, batch)
            else:
                jitted = make(ABLATIONS[name][0] if name in ABLATIONS else name).jitted
                placed = fast.place(batch)
            compiled = jitted.lower(fast.abstract_state, placed).compile()
        arms[name] = Arm(compiled, fast.init(0), placed)
        structure[name] = _structure(compiled)
        if not quiet:
            print(f"  {name:36}", _line(structure[name]), flush=True)
    arms["bare again"] = Arm(arms["bare"].compiled, fast.init(0), arms["bare"].batch)
    return arms, structure


def _structure(compiled: Any) -> dict[str, Any]:
    counts = vars(count(compiled.as_text()))
    return counts | {"temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}


def _line(s: dict[str, Any]) -> str:
    kinds = " ".join(
        f"{kind} {n} ({s['collective_bytes'][kind] / 1e6:.2f} MB)"
        for kind, n in sorted(s["collectives"].items())
    )
    return (
        f"temporaries {s['temporary_bytes'] / 1e6:.1f} MB, kernels {s['kernels']},"
        f" copies {s['copies'] / 1e6:.1f} MB, products {s['dot_flops'] / 1e9:.2f} GFLOP;"
        f" {kinds or 'no collectives'}"
    )


def interleave(arms: dict[str, Arm], seconds: float, least: int = 5) -> int:
    """Time all arms in rounds of random order until `seconds` are over; the rounds run."""
    for _ in range(2):  # the first updates pay for memory and threads
        for arm in arms.values():
            arm.run()
    order, rounds, start = np.random.default_rng(0), 0, time.monotonic()
    while rounds < least or time.monotonic() - start < seconds:
        for name in order.permutation(list(arms)):
            arms[name].timed()
        rounds += 1
    return rounds


def judge(arms: dict[str, Arm]) -> dict[str, Any]:
    """Ratios, their intervals and the verdict on every bar, of wall and of CPU time."""
    result: dict[str, Any] = {}
    for clock in ("wall", "cpu"):

        def ratio(over: str, under: str, clock: str = clock) -> Ratio:
            return paired_ratio(getattr(arms[over], clock), getattr(arms[under], clock))

        control = ratio("bare again", "bare")
        result[clock] = {
            "median_s": {name: float(np.median(getattr(a, clock))) for name, a in arms.items()},
            "control": asdict(control),
            "bars": [_judged(ratio, control, *entry) for entry in BARS],
            "ablations": {
                name: asdict(ratio(name, ABLATIONS[name][0])) for name in arms if name in ABLATIONS
            },
        }
    return result


def _judged(
    ratio: Callable[[str, str], Ratio], control: Ratio, arm: str, base: str, bar: float
) -> dict[str, Any]:
    found = ratio(arm, base)
    judged = verdict(found, control, bar)
    return {"arm": arm, "against": base, "bar": bar, "ratio": asdict(found), "verdict": judged}


def _show(result: dict[str, Any]) -> None:
    for clock in ("wall", "cpu"):
        r = result[clock]
        control = Ratio(**r["control"])
        for bar in r["bars"]:
            print(
                f"  {clock:4} {bar['arm']}/{bar['against']} {Ratio(**bar['ratio'])}"
                f"  bar {bar['bar']:.2f}: {bar['verdict']}  (A/A {control})"
            )
        for name, found in r["ablations"].items():
            print(f"  {clock:4} {name} / {ABLATIONS[name][0]} {Ratio(**found)}")


def about_this_run(command: Sequence[str]) -> dict[str, Any]:
    """Date, machine, load, versions, revision and command: what a figure is worth without."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "threads": os.environ.get("NPROC"),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")},
        "revision": git("rev-parse", "HEAD"),
        "changed": git("status", "--porcelain", "--untracked-files=no", "jaxrel", "benchmarks"),
        "command": shlex.join(command),
    }


def compare(
    size: Size, data: int, fsdp: int, seconds: float, ablations: Sequence[str]
) -> dict[str, Any]:
    """All figures of one mesh, as JSON types; prints them as well."""
    print(f"mesh {data}x{fsdp}, {size}", flush=True)
    arms, structure = make_arms(size, data, fsdp, ["fast", "invariant", *ablations])
    rounds = interleave(arms, seconds)
    result: dict[str, Any] = {"mesh": {"data": data, "fsdp": fsdp}, "rounds": rounds}
    result |= {"structure": structure, **judge(arms), "load_average_after": list(os.getloadavg())}
    _show(result)
    return result


def main(args: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_overhead")
    parser.add_argument("--mesh", nargs="+", default=["1x1", "8x1", "1x8", "2x4"], help="DxF")
    parser.add_argument("--seconds", type=float, default=120.0, help="of timing on each mesh")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--ablations", action="store_true", help="time the ablated steps as well")
    parser.add_argument("--quick", action="store_true", help="a tiny smoke, not a measurement")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(args)
    use_cpu_devices(8)
    size = QUICK if given.quick else Size(sequence=given.sequence)
    seconds = 1.0 if given.quick else given.seconds
    result = about_this_run([*parser.prog.split(), *(sys.argv[1:] if args is None else args)])
    result |= {"size": asdict(size), "meshes": []}
    for mesh in given.mesh:
        data, fsdp = (int(n) for n in mesh.split("x"))
        names = list(ABLATIONS) if given.ablations else []
        result["meshes"].append(compare(size, data, fsdp, seconds, names))
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
