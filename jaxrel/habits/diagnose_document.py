"""What the measurements of `jaxrel diagnose` mean: rows, the largest loss, and what to try."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxrel.habits.diagnose_measure import Steps
from jaxrel.habits.diagnose_products import Timed
from jaxrel.habits.diagnose_trace import Moments
from jaxrel.plan import mfu
from jaxrel.plan import waterfall as rows
from jaxrel.plan.peaks import Peak
from jaxrel.plan.waterfall import Measured, waterfall
from jaxrel.throughput.meter import StepFlops

_SLOW, _ALONE = 0.1, 0.05
"""A straggler takes so much longer than the device in the middle for the fixed computation, or
computes alone for such a share of every traced step; less is noise."""
_TRACES = 3
"""Traced steps without which nothing is said of a device that computes alone."""
_WORST = 5
"""Products of which a document tells: those that lose most."""


@dataclass(frozen=True)
class Findings:
    """All that was measured of a configuration."""

    steps: Steps
    flops: StepFlops
    """Of one step, on all devices together."""
    peak: Peak
    """Of one device; known."""
    devices: int
    tokens: int
    """Of one step."""
    products: Sequence[Timed]
    """Of one device; all devices ran them at the same time."""
    moments: Sequence[Moments] | str
    """Of the traced steps, or why there are none."""
    one_device: float | str
    """Seconds of one device's share without collectives, or why it is not known."""
    local: Mapping[str, float]
    """Seconds of the fixed computation, by device."""
    shared: bool
    """Whether the devices share cores."""
    bubble: float | None = None
    """Share of all time that a pipeline waits, by formula."""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Straggler:
    """A device that the others wait for."""

    device: str
    seconds: float
    """Of each step."""
    reason: str


def document(f: Findings) -> dict[str, Any]:
    """What `jaxrel diagnose --json` prints; shares of the step from 0 to 1, null where unknown."""
    step, synthetic = statistics.median(f.steps.real), statistics.median(f.steps.synthetic)
    parts, notes = _parts(f, synthetic)
    slow = straggler(f, parts, synthetic)
    products = sum(timed.seconds * timed.times for timed in f.products)
    fall = waterfall(
        Measured(
            step=step,
            synthetic=synthetic,
            model=_at_peak(f, f.flops.model),
            hardware=_at_peak(f, f.flops.hardware),
            products=products if f.products else None,
            compute=parts.compute,
            communication=parts.communication,
            callbacks=parts.callbacks,
            idle=parts.idle,
            straggler=slow.seconds if slow else 0.0,
            shared=f.shared,
            bubble=f.bubble,
        )
    )
    names = f"; {slow.device} {slow.reason}" if slow else ""
    return {
        **_utilisation(f, step),
        "waterfall": [asdict(row) for row in fall.rows],
        "verdict": f"largest loss: {fall.loss.name}, {fall.loss.share:.0%} of the step{names}",
        "advice": ADVICE[fall.loss.name],
        "notes": [*_of_steps(f, step, synthetic), *notes, *fall.notes, *f.notes],
        "straggler": slow and asdict(slow),
        "devices": f.devices,
        "step_s": step,
        "synthetic_step_s": synthetic,
        "one_device_s": f.one_device if isinstance(f.one_device, float) else None,
        "steps": {"real": len(f.steps.real), "synthetic": len(f.steps.synthetic)},
        "products": _worst(f),
    }


def _at_peak(f: Findings, flops: float | None) -> float | None:
    assert f.peak.flops is not None
    return None if flops is None else flops / f.devices / f.peak.flops


def _parts(f: Findings, synthetic: float) -> tuple[Moments, list[str]]:
    """What the devices do in a synthetic step, and where that is from."""
    share = f.one_device
    if isinstance(f.moments, str):
        notes = [f"no trace of a step: {f.moments}"]
        if isinstance(share, str):
            return Moments(synthetic, 0.0, 0.0, 0.0, 0.0, {}), [*notes, f"no share of it: {share}"]
        told = "communication is the step less one device's share, which has all optimizer state"
        waits = 0.0 if f.shared else max(0.0, synthetic - share)
        notes.append("devices share cores: their share alone tells no waits" if f.shared else told)
        return Moments(synthetic, share, waits, 0.0, 0.0, {}), notes
    each = [_without_profiler(moments, synthetic) for moments in f.moments]
    parts = Moments(
        step=synthetic,
        compute=statistics.median(m.compute for m in each),
        communication=statistics.median(m.communication for m in each),
        callbacks=statistics.median(m.callbacks for m in each),
        idle=statistics.median(m.idle for m in each),
        alone={},
    )
    if f.devices == 1:
        return parts, []
    told = f"communication is the trace's, {_ms(parts.communication)}"
    if isinstance(share, str):
        return parts, [f"{told}; one device's share of the step is not known: {share}"]
    if f.shared:
        return parts, [f"{told}: one device's share, {_ms(share)}, had all cores to itself"]
    more = f"less one device's share, which has all optimizer state, {_ms(synthetic - share)}"
    return parts, [f"{told}; the step {more}"]


def _without_profiler(m: Moments, synthetic: float) -> Moments:
    """The parts, so that they sum to the step without the profiler.

    That makes operations slower, and not the host's callbacks, which keep their time.
    """
    callbacks = min(m.callbacks, synthetic)
    scale = (synthetic - callbacks) / (m.step - m.callbacks) if m.step > m.callbacks else 0.0
    alone = {device: seconds * scale for device, seconds in m.alone.items()}
    return Moments(
        synthetic, m.compute * scale, m.communication * scale, callbacks, m.idle * scale, alone
    )


def straggler(f: Findings, parts: Moments, synthetic: float) -> Straggler | None:
    """The device that the others wait for, if there is one.

    Either the fixed computation takes it longer: then every computation of the step does. Or it
    computes on in every traced step when no other device does: it has more work.
    """
    found: list[Straggler] = []
    slowest = max(f.local, key=lambda device: f.local[device])
    ratio = f.local[slowest] / _median_of_others(f.local, slowest) if len(f.local) > 1 else 1.0
    if ratio > 1 + _SLOW:
        # Where cores are shared the trace's computation is that of all devices.
        share = f.one_device if isinstance(f.one_device, float) else parts.compute
        seconds = (ratio - 1) * min(share, parts.compute)
        reason = (
            f"is slow: it takes {ratio:.2f} times as long as the others for a fixed computation"
        )
        found.append(Straggler(slowest, seconds, reason))
    traces = [] if isinstance(f.moments, str) else f.moments
    each = [_without_profiler(moments, synthetic).alone for moments in traces]
    if len(each) >= _TRACES and len(each[0]) > 1:
        longer = {
            device: min(alone[device] - _median_of_others(alone, device) for alone in each)
            for device in each[0]
        }
        device = max(longer, key=lambda d: longer[d])
        if longer[device] > _ALONE * synthetic:
            reason = f"computes alone for {_ms(longer[device])} of each step"
            found.append(Straggler(device, longer[device], reason))
    return max(found, key=lambda s: s.seconds, default=None)


def _median_of_others(seconds: Mapping[str, float], device: str) -> float:
    return statistics.median(s for name, s in seconds.items() if name != device)


def _utilisation(f: Findings, step: float) -> dict[str, Any]:
    """MFU and HFU of the real step, and the reading in words."""
    if not f.flops.model:
        return {
            "mfu": None, "hfu": None, "peak_flops": f.peak.flops, "peak_source": f.peak.source,
            "reading": "unknown: no FLOPs of the model could be counted",
            "definition": f.flops.definition,
        }  # fmt: skip
    hardware = f.flops.hardware / f.tokens if f.flops.hardware else None
    count = mfu.Count(f.flops.model / f.tokens, hardware, f.flops.definition)
    found = mfu.document(count, f.tokens / step, f.devices, f.peak)
    names = ("mfu", "hfu", "peak_flops", "peak_source", "reading", "definition")
    return {name: found[name] for name in names}


def _of_steps(f: Findings, step: float, synthetic: float) -> list[str]:
    fetch = statistics.median(f.steps.fetch)
    covered = min(fetch, max(0.0, fetch - (step - synthetic)))
    low, _, high = statistics.quantiles(f.steps.real, n=4)
    return [
        f"a step takes {_ms(step)}, half of them between {_ms(low)} and {_ms(high)}",
        f"a batch takes {_ms(fetch)} to fetch and place, {_ms(covered)} of it while devices work",
    ]


def _worst(f: Findings) -> list[dict[str, Any]]:
    """The products that lose most time against the peak."""
    found = [
        {
            "shapes": str(t.product), "times": t.times, "seconds": t.seconds * t.times,
            "efficiency": (_at_peak(f, t.product.flops * f.devices) or 0.0) / t.seconds,
        }
        for t in f.products
    ]  # fmt: skip
    return sorted(found, key=lambda p: -p["seconds"] * (1 - p["efficiency"]))[:_WORST]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


ADVICE = {
    rows.RECOMPUTATION: (
        "Recompute less, if memory allows: model.remat dots or none; shard more, so that it does."
    ),
    rows.KERNELS: (
        "Make the products larger: more rows a group (fewer batch.groups, a larger batch), less"
        " tensor sharding, wider layers; `products` has the shapes that lose most."
    ),
    rows.COMPUTATION: (
        "Normalisation, softmax, optimizer and digest are bound by memory: compute in bfloat16, use"
        " a fused attention kernel, and give each device more work between updates."
    ),
    rows.COMMUNICATION: (
        "Give each device more work between collectives (a larger batch), shard parameters over"
        " fewer devices (mesh.fsdp), and keep fsdp and tensor inside a host."
    ),
    rows.STRAGGLERS: (
        "Look at that device: temperature, clocks, other processes on its host; drain it if it"
        " stays slow. If it is as fast as the others by itself, work is divided unevenly."
    ),
    rows.BUBBLE: "More microbatches, fewer stages, or an interleaved schedule: the bubble is"
    " (p-1)/(v m).",
    rows.CALLBACKS: (
        "Take the callback out of the step, or call it every so many steps: devices wait for the"
        " host each time."
    ),
    rows.IDLE: (
        "The host does not keep the devices busy: larger steps, fewer and larger operations, and no"
        " wait for a result between steps."
    ),
    rows.DATA: (
        "Read ahead more, with more threads (data.prefetch, data.threads); prepare the data before"
        " the run, or read it from a faster disk."
    ),
    rows.REST: (
        "The measurements do not account for it: run again on a quieter machine, or with more"
        " --seconds; then look at a profile."
    ),
}
"""What to try, by the row that loses most."""
