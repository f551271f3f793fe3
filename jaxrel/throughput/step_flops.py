"""FLOPs of one training step: what its mathematics needs, and what its program does."""

from collections.abc import Callable
from typing import Any

from jaxrel.throughput.hardware_flops import HardwareFlops, HasText, hardware_flops
from jaxrel.throughput.meter import StepFlops
from jaxrel.throughput.model_flops import Count, count_flops

_HARDWARE = "hardware FLOPs: every dot and convolution of the compiled program, as often as it runs"


def step_flops(fn: Callable[..., Any], *args: Any, compiled: HasText | None = None) -> StepFlops:
    """Of one call of `fn(*args)`, on all devices together; `compiled` is what runs it.

    A figure is None when part of it could not be counted, and the definition names what. Traces
    `fn`; neither compiles nor runs anything.
    """
    found = None if compiled is None else hardware_flops(compiled)
    return as_step_flops(count_flops(fn, *args), found)


def as_step_flops(model: Count, hardware: HardwareFlops | None) -> StepFlops:
    """The two counts, as the meter wants them."""
    words = [model.definition]
    words += [f"not counted: {', '.join(u.name for u in model.uncounted)}"] * bool(model.uncounted)
    contraction = None
    if hardware is not None:
        contraction = hardware.all_devices.contraction
        words.append(_HARDWARE)
        if contraction is None:
            words.append(f"not counted: {'; '.join(hardware.uncounted)}")
    return StepFlops(model.model, contraction, "; ".join(words))
