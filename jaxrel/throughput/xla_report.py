"""XLA's own count of FLOPs, beside ours."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrel.throughput.hardware_flops import HardwareFlops, HasText, hardware_flops

_AGREEMENT = 0.01
"""Share of XLA's FLOPs that may stay without a reason: it counts in float32."""


class HasCost(HasText, Protocol):
    """A `jax.stages.Compiled`, as far as it is used here."""

    def cost_analysis(self) -> Any:
        """XLA's properties of the program; the type differs between versions of JAX."""
        ...


@dataclass(frozen=True)
class XlaReport:
    """XLA's FLOPs of one execution on one device, and how they differ from ours."""

    flops: float | None
    """As `cost_analysis` says, transcendentals apart; None when it does not."""
    reason: str | None
    """Why `flops` is None, in words."""
    counted: float | None
    """Our count of the same: contractions, elementwise and collectives; None when unknown."""
    difference: tuple[str, ...]
    """Why the two differ: each reason with the FLOPs that ours has more."""


def xla_report(compiled: HasCost, hardware: HardwareFlops | None = None) -> XlaReport:
    """XLA's own FLOPs for `compiled`, a `jax.stages.Compiled`, and why ours differ. Never raises.

    `hardware` saves counting again where `hardware_flops(compiled)` is at hand.
    """
    hardware = hardware or hardware_flops(compiled)
    ours = hardware.per_device
    parts = (ours.contraction, ours.elementwise, ours.collective)
    counted = None if None in parts else sum(part or 0 for part in parts)
    try:
        flops, reason = _flops(compiled.cost_analysis())
    except Exception as error:  # a metric may fail without stopping the run
        flops, reason = None, f"cost_analysis raised {type(error).__name__}: {error}"
    difference = () if flops is None else _difference(flops, hardware)
    return XlaReport(flops, reason, counted, difference)


def _flops(found: Any) -> tuple[float | None, str | None]:
    """FLOPs from whatever `cost_analysis` returned, or the reason why there are none."""
    if isinstance(found, Sequence) and not isinstance(found, str) and found:
        each = [_flops(part) for part in found]  # one entry a program in older versions of JAX
        why = next((reason for _, reason in each if reason), None)
        return (None, why) if why else (sum(flops or 0 for flops, _ in each), None)
    if not isinstance(found, Mapping):
        return None, f"cost_analysis returned {found!r:.80}: expected a mapping with flops"
    if "flops" not in found:
        return None, "cost_analysis has no entry flops"
    try:
        flops = float(found["flops"])
    except (TypeError, ValueError):
        flops = math.nan
    if flops < 0:
        return None, f"cost_analysis says flops = {flops}: XLA's mark for unknown"
    if not math.isfinite(flops):
        return None, f"cost_analysis says flops = {found['flops']!r:.80}: expected a number"
    return flops, None


def _difference(flops: float, hardware: HardwareFlops) -> tuple[str, ...]:
    lines = [f"{reason}: {more:+,.6g}" for reason, more in hardware.reasons.items()]
    unexplained = hardware.by_xla_rules - flops
    if abs(unexplained) > _AGREEMENT * max(flops, hardware.by_xla_rules):
        lines.append(f"no reason known: {unexplained:+,.6g}")
    return tuple(lines)
