"""`jaxrel diagnose`: where the time of a training step goes, from the peak down to MFU.

Measured first: the step as the loop does it, the step without data, the step under the profiler,
the products of the step alone, one device's share of it, and a fixed computation on each device.
Formulas only turn FLOPs into seconds, and a pipeline into its bubble. docs/diagnose.md says what
each row is and what it leaves out.

Nothing is written into the run: no checkpoint, no record, no compiled program.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxrel.config import Config
from jaxrel.exit_codes import ExitCode, FailedError, UsageError
from jaxrel.habits import diagnose_show
from jaxrel.plan import bubble, peaks
from jaxrel.plan.peaks import Peak

if TYPE_CHECKING:  # so that a refusal does not wait for JAX
    from jaxrel.habits.diagnose_document import Findings
    from jaxrel.habits.diagnose_measure import Work
    from jaxrel.train.task import MakeTask

_SHARES = {"one device": 0.1, "steps": 0.6, "traces": 0.2}
"""Of the seconds that are given; the rest is for the peak and the fixed computation."""
_CALLBACKS = ("pure_callback", "io_callback")
"""What the host computes in a step is none of its devices' FLOPs."""


@dataclass(frozen=True)
class Diagnose:
    """The flags of `jaxrel diagnose`."""

    seconds: float = 20.0
    """For all measurements together, compilation apart; more where a step takes long."""
    stages: int | None = None
    microbatches: int | None = None
    interleave: int = 1
    """The pipeline that the step runs, if it runs one."""
    svg: str | None = None
    """File for the picture."""
    json: bool = False

    def check(self, config: Config) -> None:
        """Refuse what cannot be measured. Raises UsageError, naming the flag or the key."""
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"--seconds: got {self.seconds:g}: expected a number above 0")
        if (self.stages is None) != (self.microbatches is None):
            missing = "microbatches" if self.microbatches is None else "stages"
            raise UsageError(f"--{missing}: got nothing: expected it, --stages and --microbatches")
        if self.stages is None and self.interleave != 1:
            raise UsageError(f"--interleave: got {self.interleave}: expected --stages with it")
        self.bubble()
        if self.svg is not None and (not Path(self.svg).parent.is_dir() or Path(self.svg).is_dir()):
            raise UsageError(f"--svg: got {self.svg!r}: expected a file in a folder that is there")
        if config.job.detect or config.job.num_processes not in (None, 1):
            raise UsageError(
                "job: got more than one process: expected one; diagnose measures the devices of"
                " one process: run it alone on one host, on the part of the mesh that this has"
            )

    def bubble(self) -> float | None:
        """Share of all time that the pipeline waits, by formula; None without one."""
        if self.stages is None or self.microbatches is None:
            return None
        found = bubble.document(self.stages, self.microbatches, self.interleave)
        return found["bubble_fraction"]


def diagnose(
    config: Config,
    asked: Diagnose,
    make_task: "MakeTask | None" = None,
    work: "Work | None" = None,
    console: Console | None = None,
) -> int:
    """Measure, tell, and draw; 0 when it was measured, whatever came out.

    `make_task` is what is trained, `work` the fixed computation that shows a slow device. Raises
    UsageError before anything is compiled, DataRefusedError for data that cannot be used,
    FailedError where the step cannot be measured.
    """
    asked.check(config)
    from jaxrel.habits.diagnose_document import document

    say = Console(stderr=True, highlight=False, soft_wrap=True).print
    found = document(measure(config, asked, make_task, work, lambda t: say(t, markup=False)))
    console = console or Console(highlight=False)
    if asked.json:
        console.out(json.dumps(found, allow_nan=False))
    else:
        diagnose_show.show(found, console)
    if asked.svg is not None:
        Path(asked.svg).write_text(diagnose_show.svg(found), encoding="utf-8")
    return ExitCode.OK


def measure(
    config: Config,
    asked: Diagnose,
    make_task: "MakeTask | None" = None,
    work: "Work | None" = None,
    say: Callable[[str], None] = lambda text: None,
) -> "Findings":
    """All measurements, as `diagnose` makes them."""
    import jax

    from jaxrel.habits import diagnose_measure as by
    from jaxrel.habits.diagnose_document import Findings
    from jaxrel.habits.diagnose_products import Bench, flops, products
    from jaxrel.mesh.join import fix_cpu_threads, use_cpu_devices
    from jaxrel.throughput import count_flops
    from jaxrel.throughput.hardware_flops import hardware_flops
    from jaxrel.throughput.op_kinds import read_program
    from jaxrel.throughput.peak import device_peak
    from jaxrel.throughput.step_flops import as_step_flops
    from jaxrel.train.run import prepare
    from jaxrel.train.task import reference_task

    fix_cpu_threads()
    if config.mesh.cpu_devices is not None:
        use_cpu_devices(config.mesh.cpu_devices)
    task, step, feed = prepare(config, make_task or reference_task)
    devices, mesh = jax.local_devices(), step.layout.mesh
    try:
        feed.start(0, None)
        batch = next(feed)
        placed = step.layout.place(batch)
        say("compiling the step")
        compiled = step.compiled(placed)
        text = compiled.jitted.as_text() or ""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), placed)
        model = count_flops(
            step.jitted, step.abstract_state, shapes, estimators=dict.fromkeys(_CALLBACKS, _none)
        )
        counted = as_step_flops(model, hardware_flops(compiled.jitted))
        say("measuring the peak")
        peak = _peak(config, devices, device_peak)
        alone = products(text)
        say("timing a fixed computation on each device")
        local = by.time_locally(devices, work or by.fixed_work)
        say("timing one device's share of the step")
        seconds = asked.seconds * _SHARES["one device"]
        one_device = by.one_device(config, task, step.layout, batch, seconds)
        say(f"timing steps, with data and without, and their products: {len(alone)} shapes")
        bench = Bench(alone, devices)
        loop = by.Loop(compiled, step.init(config.run.seed))
        seconds = asked.seconds * _SHARES["steps"]
        ahead = config.data.prefetch
        steps = by.time_steps(loop, feed, placed, bench, ahead=ahead, seconds=seconds)
        say("tracing steps")
        shared = devices[0].platform == "cpu" and len(devices) > 1
        seconds = asked.seconds * _SHARES["traces"]
        programs = [read_program(text)]
        moments = by.sample_moments(loop, placed, programs, shared=shared, seconds=seconds)
    finally:
        feed.close()
    notes = [f"{product} could not be timed: {why}" for product, why in bench.failed.items()]
    program = counted.hardware and counted.hardware / mesh.size
    if program is not None and flops(alone) != program:
        notes.append(f"of {program:.6g} FLOPs in products {flops(alone):.6g} could be timed")
    tokens = config.batch.global_size * config.batch.sequence
    return Findings(
        steps, counted, peak, mesh.size, tokens, bench.timed(), moments, one_device, local, shared,
        asked.bubble(), notes,
    )  # fmt: skip


def _none(_: Any) -> int:
    return 0


def _peak(config: Config, devices: Sequence[Any], device_peak: Any) -> Peak:
    """As configured, by the table, or else measured. Raises FailedError."""
    wanted, dtype = config.throughput.peak_flops, config.model.compute_dtype
    if wanted is None and peaks.peak(devices[0].device_kind, dtype).flops is None:
        wanted = "measured"
    found = device_peak(dtype, wanted, devices)
    if found.flops is None:
        raise FailedError(f"the peak is {found.source}; give throughput.peak_flops a number")
    return found
