"""FLOPs of one training step: what its mathematics needs, and what its program does."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any

from jaxrel.throughput.hardware_flops import HardwareFlops, HasText, hardware_flops
from jaxrel.throughput.meter import UNKNOWN, StepFlops
from jaxrel.throughput.model_flops import Count, count_flops

log = logging.getLogger(__name__)

_HARDWARE = "hardware FLOPs: every dot and convolution of the compiled program, as often as it runs"


def counted_beside(fn: Callable[..., Any], *args: Any) -> Callable[[HasText], StepFlops]:
    """Begin to count the FLOPs of `fn(*args)`, on all devices together, while it is compiled.

    Call what is returned with the compiled program: it waits for the count. Counting takes up to
    a second of Python, and a compiler most of a core of its own. A failure leaves the FLOPs
    unknown, with one warning. Traces `fn`; compiles and runs nothing.
    """
    counting: Future[Count] = Future()

    def count() -> None:
        try:
            counting.set_result(count_flops(fn, *args))
        except Exception as error:
            counting.set_exception(error)

    Thread(target=count, name="count FLOPs", daemon=True).start()

    def counted(compiled: HasText) -> StepFlops:
        try:
            return as_step_flops(counting.result(), hardware_flops(compiled))
        except Exception as error:  # a metric may fail without stopping the run
            log.warning("FLOPs of the step are unknown: %s: %s", type(error).__name__, error)
            return UNKNOWN

    return counted


def as_step_flops(model: Count, hardware: HardwareFlops) -> StepFlops:
    """The two counts, as the meter wants them; one is None when part of it could not be counted,
    and the definition names what."""
    words = [model.definition]
    words += [f"not counted: {', '.join(u.name for u in model.uncounted)}"] * bool(model.uncounted)
    contraction = hardware.all_devices.contraction
    words.append(_HARDWARE)
    if contraction is None:
        words.append(f"not counted: {'; '.join(hardware.uncounted)}")
    return StepFlops(model.model, contraction, "; ".join(words))
