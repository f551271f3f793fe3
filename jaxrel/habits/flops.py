"""`jaxrel flops CONFIG`: what a step of a configuration costs, by three counts side by side."""

import math
import textwrap
from typing import Any

from jaxrel.config import Config
from jaxrel.mesh.join import fix_cpu_threads, use_cpu_devices
from jaxrel.throughput import count_flops
from jaxrel.throughput.hardware_flops import hardware_flops
from jaxrel.throughput.step_flops import as_step_flops
from jaxrel.throughput.xla_report import xla_report
from jaxrel.train.run import prepare
from jaxrel.train.task import MakeTask, reference_task


def flops(config: Config, make_task: MakeTask = reference_task) -> dict[str, Any]:
    """The document of `jaxrel flops --json`; trains nothing and writes nothing into the run.

    Compiles the step for the devices that there are. FLOPs are of one step on all devices
    together; a count is null where part of it is not known, and `uncounted` names that. XLA's own
    number is of the compiled program, which runs on each device, times devices.
    """
    fix_cpu_threads()
    if config.mesh.cpu_devices is not None:
        use_cpu_devices(config.mesh.cpu_devices)
    _, step, feed = prepare(config, make_task)
    try:
        feed.start(0, None)
        batch = step.layout.place(next(feed))
    finally:
        feed.close()
    model = count_flops(step.jitted, step.abstract_state, batch)
    compiled = step.compiled(batch).jitted
    hardware = hardware_flops(compiled)
    xla = xla_report(compiled, hardware)
    both = as_step_flops(model, hardware)
    tokens = config.batch.global_size * config.batch.sequence
    return {
        "model_flops_per_token": None if both.model is None else both.model / tokens,
        "model_flops_per_step": both.model,
        "hardware_flops_per_step": both.hardware,
        "xla_reported_flops_per_step": None if xla.flops is None else xla.flops * hardware.devices,
        "by_operation": dict(model.by_operation),
        "uncounted": [
            *(f"{u.name}: {u.reason} ({u.where})" for u in model.uncounted),
            *hardware.uncounted,
        ],
        "definition": both.definition,
        "devices": hardware.devices,
        "tokens_per_step": tokens,
        "model_flops_per_device": model.per_device,
        "hardware_flops_per_device": hardware.per_device.contraction,
        "recomputed_share": _more(both.hardware, both.model),
        "xla_difference": [xla.reason] if xla.reason else list(xla.difference),
        "notes": [*model.notes, *hardware.notes],
    }


def _more(hardware: float | None, model: float | None) -> float | None:
    """Of the model FLOPs, what the hardware does on top."""
    return None if hardware is None or not model else hardware / model - 1


def table(document: dict[str, Any]) -> str:
    """The document for a terminal."""
    rows = [
        ("model, a token", document["model_flops_per_token"]),
        ("model, a step", document["model_flops_per_step"]),
        ("hardware, a step", document["hardware_flops_per_step"]),
        ("XLA's own, a step", document["xla_reported_flops_per_step"]),
    ]
    lines = [f"{name:18} {'unknown' if n is None else f'{n:>22,.0f}'} FLOPs" for name, n in rows]
    more = document["recomputed_share"]
    if more is not None and not math.isclose(more, 0, abs_tol=5e-4):
        lines.append(f"the hardware does {more:+.1%} beside the model: recomputation, mostly")
    lines += [f"{name:18} {n:>22,}" for name, n in document["by_operation"].items()]
    for title in ("uncounted", "xla_difference"):
        if document[title]:
            lines += ["", {"uncounted": "not counted:", "xla_difference": "XLA differs:"}[title]]
            lines += [f"  {line}" for line in document[title][:_LINES]]
            rest = len(document[title]) - _LINES
            lines += [f"  and {rest} more"] if rest > 0 else []
    return "\n".join([*lines, "", textwrap.fill(document["definition"], 96)])


_LINES = 8
