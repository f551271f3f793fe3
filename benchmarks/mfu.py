"""Tokens per second, MFU and HFU of jaxrel's own step, on whatever devices there are.

    python -m benchmarks.mfu --size 125m 350m --mesh 8x1 2x4 --out benchmarks/results/NAME.json
    python -m benchmarks.mfu --cpu-devices 8 --size tiny small
    python -m benchmarks.mfu --quick

Each size on each mesh is compiled, warmed up and timed, every step waited for. A job of several
processes runs the same command in each: JAXREL_COORDINATOR, JAXREL_PROCESS_ID and
JAXREL_NUM_PROCESSES say who they are, or `--detect` lets JAX find out. See benchmarks/README.md
for what the columns mean.
"""

import argparse
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.step_overhead import Arm, about_this_run
from jaxrel.checkpoint.together import from_everyone
from jaxrel.config import BatchConfig, Config, JobConfig, MeshConfig, ModelConfig, check, show
from jaxrel.config_file import with_environment
from jaxrel.exit_codes import UsageError
from jaxrel.mesh.build import build_mesh
from jaxrel.mesh.join import fix_cpu_threads, joined, use_cpu_devices
from jaxrel.plan import conventions, mfu, peaks
from jaxrel.plan.architecture import Architecture
from jaxrel.plan.peaks import Peak
from jaxrel.throughput.hardware_flops import hardware_flops
from jaxrel.throughput.model_flops import count_flops
from jaxrel.throughput.peak import device_peak
from jaxrel.throughput.profile_step import profiled
from jaxrel.train.run import make_step
from jaxrel.train.task import reference_task

CONVENTIONS = ("maxtext", "maxtext_causal")
"""Counts by formula, beside the one from the program. The first counts what the program does."""
HARDWARE = "hardware FLOPs: contractions of the optimised HLO, loops as often as they run"


@dataclass(frozen=True)
class Size:
    """A reference model, and how much of its text a device takes at once."""

    model: ModelConfig
    sequence: int
    rows: int
    """Sequences on each device."""

    @staticmethod
    def of(*numbers: int, sequence: int, rows: int) -> "Size":
        """layers, hidden, heads, kv_heads, head_dim, mlp, vocabulary."""
        return Size(ModelConfig(*numbers, dropout=0.0), sequence, rows)


SIZES = {
    # The model of scripts/configs/tiny.yaml.
    "tiny": Size.of(4, 64, 4, 2, 16, 192, 256, sequence=64, rows=4),
    "small": Size.of(4, 256, 8, 4, 32, 768, 256, sequence=128, rows=4),
    # Depth, width and heads of GPT-3 small and medium; gated feed-forward, untied embeddings.
    "125m": Size.of(12, 768, 12, 12, 64, 2048, 32000, sequence=2048, rows=8),
    "350m": Size.of(24, 1024, 16, 16, 64, 2560, 32000, sequence=2048, rows=8),
    "1b": Size.of(22, 2048, 32, 4, 64, 5632, 32000, sequence=2048, rows=4),  # TinyLlama 1.1B
    "7b": Size.of(32, 4096, 32, 32, 128, 11008, 32000, sequence=4096, rows=1),  # Llama 2 7B
}
NUMBERS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "mlp", "vocabulary")
"""What flags may change in the model of a size."""
QUICK = Size.of(2, 32, 2, 2, 16, 96, 256, sequence=16, rows=2)


def configuration(given: argparse.Namespace, size: Size, data: int, fsdp: int) -> Config:
    """The run that is timed. Raises UsageError."""
    changed = {n: getattr(given, n) for n in NUMBERS if getattr(given, n) is not None}
    model = replace(size.model, **changed, remat=given.remat, compute_dtype=given.dtype)
    devices = data * fsdp
    batch = BatchConfig(
        global_size=size.rows * devices if given.batch is None else given.batch,
        sequence=size.sequence if given.sequence is None else given.sequence,
        groups=devices if given.groups is None else given.groups,
        reduction=given.reduction,
    )
    config = Config(mesh=MeshConfig(data=data, fsdp=fsdp), batch=batch, model=model)
    check(config)
    return config


def measure(
    config: Config, given_peak: float | Literal["measured"] | None, steps: int, warmup: int
) -> dict[str, Any]:
    """All figures of one configuration, as JSON types. Collective in a job."""
    data, fsdp, batch = config.mesh.data, config.mesh.fsdp, config.batch
    devices = _devices(data, fsdp)
    peak = common_peak(given_peak, config.model.compute_dtype, devices)
    task = reference_task(config)
    step = make_step(config, task, build_mesh({"data": data, "fsdp": fsdp, "tensor": 1}, devices))
    shape = (batch.global_size, batch.sequence + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocabulary, shape, dtype=np.int32)
    placed = step.place({"tokens": tokens})
    start = time.perf_counter()
    compiled = step.compiled(placed).jitted
    compile_s = time.perf_counter() - start
    arm = Arm(compiled, step.init(0), placed)
    for _ in range(warmup):
        arm.run()
    for _ in range(steps):
        arm.timed()
    return {
        "mesh": {"data": data, "fsdp": fsdp},
        "devices": len(devices),
        **{key: value for key, value in asdict(batch).items() if key != "global_size"},
        "global_batch": batch.global_size,
        "remat": config.model.remat,
        "dtype": config.model.compute_dtype,
        "compile_s": compile_s,
        "loss": arm.run(),
        **_speed(arm.wall, batch.global_size * batch.sequence, len(devices)),
        **utilisation(config, task.loss_fn, step.abstract_state.params, compiled, arm.wall, peak),
        "memory": memory(compiled, devices),
        "breakdown": breakdown(arm.run, compiled),
    }


def _devices(data: int, fsdp: int) -> list[Any]:
    """The first devices, as many as the mesh has. Raises UsageError."""
    found = jax.devices()
    if jax.process_count() > 1 and data * fsdp != len(found):
        raise UsageError(
            f"mesh: got {data}x{fsdp}: a job of several processes uses all {len(found)} devices"
        )
    return found[: data * fsdp]


def common_peak(
    given: float | Literal["measured"] | None, dtype: str, devices: Sequence[Any]
) -> Peak:
    """The peak that all processes divide by: as given, by the table, or else measured."""
    if given is None and peaks.peak(devices[0].device_kind, dtype).flops is None:
        given = "measured"
    return _same_everywhere(given, dtype, tuple(devices))


@functools.cache  # meshes of the same devices are judged by the same peak
def _same_everywhere(
    given: float | Literal["measured"] | None, dtype: str, devices: tuple[Any, ...]
) -> Peak:
    from_everyone(None)  # those that measure do so at the same time
    return Peak(**from_everyone(asdict(device_peak(dtype, given, devices)))[0])


def _speed(seconds: Sequence[float], tokens: int, devices: int) -> dict[str, Any]:
    median = float(np.median(seconds))
    low, high = np.quantile(seconds, [0.1, 0.9])
    return {
        "step_s": {"median": median, "p10": float(low), "p90": float(high), "all": list(seconds)},
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / median,
        "tokens_per_second_per_device": tokens / median / devices,
    }


def utilisation(
    config: Config, loss_fn: Any, params: Any, compiled: Any, seconds: Sequence[float], peak: Peak
) -> dict[str, Any]:
    """MFU and HFU of the median step, and MFU by formula; model FLOPs are those of the gradient."""
    rows, sequence = config.batch.global_size, config.batch.sequence
    tokens, devices = rows * sequence, config.mesh.data * config.mesh.fsdp
    batch = {"tokens": jax.ShapeDtypeStruct((rows, sequence + 1), jnp.int32)}
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    model = count_flops(gradient, params, batch, jax.random.key(0))
    assert model.model is not None, model.uncounted  # the reference model has no such operation
    hardware = hardware_flops(compiled)
    contraction = hardware.all_devices.contraction
    per_token = None if contraction is None else contraction / tokens
    count = mfu.Count(model.model / tokens, per_token, f"{model.definition}; {HARDWARE}")
    speed = tokens / float(np.median(seconds))
    architecture = describe(config, params)
    by_formula: dict[str, Any] = {}
    for name in CONVENTIONS:
        flops = conventions.flops_per_token(architecture, name)
        by_formula[name] = {
            "flops_per_token": flops,
            "mfu": mfu.mfu(flops, speed, devices, peak.flops),
            "definition": conventions.find(name).definition,
        }
    return {
        "parameters": architecture.parameters,
        "architecture": {k: v for k, v in asdict(architecture).items() if v is not None},
        **mfu.document(count, speed, devices, peak),
        "model_flops_per_step": model.model,
        "hardware_flops_per_step": contraction,
        "hardware_uncounted": list(hardware.uncounted),
        "conventions": by_formula,
        "counted_over_formula": count.model / by_formula[CONVENTIONS[0]]["flops_per_token"],
    }


def describe(config: Config, params: Any) -> Architecture:
    """The reference model in the words of the conventions."""
    m = config.model
    return Architecture(
        **{name: getattr(m, name) for name in NUMBERS},
        mlp_matrices=3,
        sequence=config.batch.sequence,
        parameters=sum(x.size for x in jax.tree.leaves(params)),
        tied=False,
    )


def memory(compiled: Any, devices: Sequence[Any]) -> dict[str, int | None]:
    """Bytes on one device: what the compiler plans, and the most that was in use.

    The latter, of all programs since the process began, is null where a backend does not say.
    """
    plan = compiled.memory_analysis()
    stats = [d.memory_stats() or {} for d in devices if d.process_index == jax.process_index()]
    most = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return {
        "temporaries": None if plan is None else plan.temp_size_in_bytes,
        "arguments": None if plan is None else plan.argument_size_in_bytes,
        "peak_in_use": max(most, default=None),
    }


_PARTS = ("step_s", "compute_s", "exposed_communication_s", "callback_s", "other_s", "idle_s")


def breakdown(act: Callable[[], Any], compiled: Any) -> dict[str, float] | None:
    """Seconds of one step by what the devices do in it; None where the profiler cannot tell.

    `act` runs one step of `compiled` and waits for it.
    """
    split = profiled(act, [compiled.as_text() or ""])
    return None if isinstance(split, str) else {name: getattr(split, name) for name in _PARTS}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each configuration."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "size", "mesh", "parameters", "batch", "step ms", "10-90%", "tokens/s", "MFU",
        "MFU causal", "HFU", "temporaries MB", "arguments MB", "most in use MB", "breakdown",
    ):  # fmt: skip
        made.add_column(name, justify="left" if name in ("size", "breakdown") else "right")
    for row in rows:
        step, sizes = row["step_s"], row["memory"]
        made.add_row(
            row["size"],
            "x".join(str(n) for n in row["mesh"].values()),
            f"{row['parameters']:,}",
            f"{row['global_batch']}x{row['sequence']}",
            f"{1e3 * step['median']:,.2f}",
            f"{1e3 * step['p10']:,.2f}-{1e3 * step['p90']:,.2f}",
            f"{row['tokens_per_second']:,.0f}",
            _percent(row["mfu"], row["peak_flops"]),
            _percent(row["conventions"]["maxtext_causal"]["mfu"], row["peak_flops"]),
            _percent(row["hfu"], row["peak_flops"], row["hardware_flops_per_step"]),
            *(_megabytes(sizes[k]) for k in ("temporaries", "arguments", "peak_in_use")),
            _shares(row["breakdown"]),
        )
    return made


def _percent(share: float | None, *needed: float | None) -> str:
    """A share that is missing though all that it needs is known would be above 1."""
    if share is not None:
        return f"{share:.1%}"
    return "unknown" if None in needed else "invalid"


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:,.1f}"


def _shares(split: dict[str, float] | None) -> str:
    """Parts of a step that are not nothing."""
    if split is None:
        return "unknown"
    parts = {k.removesuffix("_s").replace("_", " "): v / split["step_s"] for k, v in split.items()}
    return ", ".join(f"{k} {v:.0%}" for k, v in parts.items() if k != "step" and v >= 0.005)


def footnotes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the table's numbers depend on, each said once."""
    lines = [f"MFU, HFU  {row['definition']}" for row in rows]
    for name in CONVENTIONS:
        lines += [f"{name}  {row['conventions'][name]['definition']}" for row in rows]
    lines += [
        f"{row['size']}: counted / {CONVENTIONS[0]} = {row['counted_over_formula']:.6f}"
        for row in rows
    ]
    return list(dict.fromkeys(lines))


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.mfu")
    made.add_argument("--size", nargs="+", choices=list(SIZES), default=["tiny"])
    for name in NUMBERS:
        flag = f"--{name.replace('_', '-')}"
        made.add_argument(flag, type=int, help="in the place of the size's own")
    made.add_argument("--mesh", nargs="+", metavar="DxF", help="data x fsdp; default 1xDEVICES")
    made.add_argument("--dtype", choices=["float32", "bfloat16"], help="default by the devices")
    made.add_argument("--batch", type=int, help="sequences in the global batch; default by size")
    made.add_argument("--sequence", type=int, help="tokens of a sequence; default by size")
    made.add_argument("--groups", type=int, help="parts of the batch; default one a device")
    made.add_argument("--remat", choices=["none", "dots", "full"], default="full")
    made.add_argument("--reduction", choices=["fast", "invariant"], default="fast")
    made.add_argument("--peak", type=_peak, metavar="FLOPS", help="of one device, or measured")
    made.add_argument("--steps", type=int, default=20, help="timed")
    made.add_argument("--warmup", type=int, default=3, help="steps before, not timed")
    made.add_argument("--cpu-devices", type=int, help="simulate so many in this process")
    made.add_argument("--detect", action="store_true", help="let JAX find the job's processes")
    made.add_argument("--quick", action="store_true", help="a tiny smoke, not a measurement")
    made.add_argument("--out", type=Path, help="JSON file for the result")
    return made


def _peak(text: str) -> float | str:
    return text if text == "measured" else float(text)


def _mesh(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]+)x([0-9]+)", text)
    data, fsdp = (int(found[1]), int(found[2])) if found else (0, 0)
    if any(degree.bit_count() != 1 for degree in (data, fsdp)):
        raise UsageError(f"mesh: got {show(text)}: expected data x fsdp, powers of two, as in 8x1")
    return data, fsdp


def run(given: argparse.Namespace, about: dict[str, Any]) -> dict[str, Any]:
    """All configurations; prints the table, and writes what there is after each."""
    meshes = [_mesh(m) for m in given.mesh or [f"1x{jax.device_count()}"]]
    given.dtype = given.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    sizes = {"quick": QUICK} if given.quick else {name: SIZES[name] for name in given.size}
    steps, warmup = (3, 1) if given.quick else (given.steps, given.warmup)
    if steps < 1:
        raise UsageError(f"steps: got {steps}: expected at least 1")
    every = [(name, configuration(given, s, *mesh)) for name, s in sizes.items() for mesh in meshes]
    first = jax.devices()[0]
    result = about | {
        "device_kind": first.device_kind,
        "platform": first.platform,
        "device_count": jax.device_count(),
        "processes": jax.process_count(),
        "rows": [],
    }
    leads, console = jax.process_index() == 0, Console(markup=False, highlight=False)
    for name, config in every:
        result["rows"].append({"size": name, **measure(config, given.peak, steps, warmup)})
        if leads and given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    if leads:
        console.width = max(console.width, 200)  # of a file, or of a terminal that wraps
        console.print(table(result["rows"]))
        for line in footnotes(result["rows"]):
            console.print(line, soft_wrap=True)
    return result


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """The command line; returns what it writes."""
    flags = parser()
    given = flags.parse_args(args)
    start = Config(
        mesh=MeshConfig(cpu_devices=given.cpu_devices), job=JobConfig(detect=given.detect)
    )
    start = with_environment(start)
    fix_cpu_threads()
    if start.mesh.cpu_devices is not None:
        use_cpu_devices(start.mesh.cpu_devices)
    about = about_this_run([*flags.prog.split(), *(sys.argv[1:] if args is None else args)])
    try:
        with joined(start.job):
            return run(given, about)
    except UsageError as error:
        flags.exit(error.code, f"{flags.prog}: {error}\n")


if __name__ == "__main__":
    main()
