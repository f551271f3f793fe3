"""Model and hardware FLOPs utilisation (MFU, HFU) from numbers, with what they mean.

Utilisation is FLOPs per token x tokens per second / (devices x peak FLOP/s of a device). MFU (PaLM,
arXiv 2204.02311, section 4.1) takes the FLOPs that the model needs, HFU those that the hardware
does, recomputation included. Neither says anything without how the FLOPs were counted and which
peak was taken.
"""

import math
import textwrap
from dataclasses import dataclass
from typing import Any

from jaxrel.exit_codes import UsageError
from jaxrel.plan.architecture import Architecture
from jaxrel.plan.conventions import find, flops_per_token
from jaxrel.plan.peaks import Peak

_PUBLISHED = "38-43% of a published 405B run (Llama 3, 8,192 to 16,384 H100)"
_CAUSES = (
    "check FLOPs per token, tokens per second, devices (of some TPUs a JAX device is half a chip),"
    " dtype and peak"
)


@dataclass(frozen=True)
class Count:
    """FLOPs of training on one token, forward and backward, and how they were counted."""

    model: float
    hardware: float | None
    definition: str


def mfu(
    flops_per_token: float, tokens_per_second: float, devices: int, peak_flops: float | None
) -> float | None:
    """Utilisation, 0 to 1; None when the peak is unknown or the inputs give more than 1.

    `tokens_per_second` is that of all `devices` (JAX devices), `peak_flops` that of one. HFU when
    `flops_per_token` are hardware FLOPs. More than 1 is an error in the inputs, never a result.
    Raises UsageError.
    """
    given = {
        "flops_per_token": flops_per_token,
        "tokens_per_second": tokens_per_second,
        "devices": devices,
        "peak_flops": 1.0 if peak_flops is None else peak_flops,
    }
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise UsageError(f"{name}: got {value:g}: expected a number above 0")
    if peak_flops is None:
        return None
    share = flops_per_token / devices * tokens_per_second / peak_flops
    return share if share <= 1 else None


def counted(architecture: Architecture, convention: str, hardware: float | None = None) -> Count:
    """What a convention counts: its own hardware FLOPs, or `hardware` as given. Raises UsageError.

    A convention of hardware FLOPs gives both: its paper's count of model FLOPs stands beside it.
    """
    named = find(convention)
    flops = flops_per_token(architecture, convention)
    if named.model is None:
        words = f"model FLOPs a token by {convention}: {named.definition}"
        return Count(flops, hardware, words + _also_given(hardware))
    if hardware is not None:
        raise UsageError(
            f"hardware_flops_per_token: got {hardware:g}: {convention} gives them; leave it out"
        )
    return Count(
        flops_per_token(architecture, named.model),
        flops,
        f"hardware FLOPs a token by {convention}: {named.definition}; model FLOPs a token by"
        f" {named.model}: {find(named.model).definition}",
    )


def given(flops: float, hardware: float | None = None) -> Count:
    """FLOPs per token that somebody else has counted."""
    words = "model FLOPs a token as given: attention and embeddings as whoever gave them counted"
    return Count(flops, hardware, words + _also_given(hardware))


def _also_given(hardware: float | None) -> str:
    return "" if hardware is None else "; hardware FLOPs a token as given"


def document(count: Count, tokens_per_second: float, devices: int, peak: Peak) -> dict[str, Any]:
    """What `plan mfu --json` prints; shares from 0 to 1, null where there is none.

    `mfu` and `hfu` are null, and `reading` says why, when the peak is unknown or they would be
    above 1; `hfu` also when no hardware FLOPs are known. Raises UsageError.
    """
    model = mfu(count.model, tokens_per_second, devices, peak.flops)
    hardware = None
    if count.hardware is not None:
        hardware = mfu(count.hardware, tokens_per_second, devices, peak.flops)
    return {
        "mfu": model,
        "hfu": hardware,
        "model_flops_per_token": count.model,
        "hardware_flops_per_token": count.hardware,
        "peak_flops": peak.flops,
        "peak_source": peak.source,
        "definition": _definition(count, peak),
        "reading": _reading(model, hardware, count, peak),
    }


def _reading(model: float | None, hardware: float | None, count: Count, peak: Peak) -> str:
    """What the numbers say, in words."""
    if peak.flops is None:
        return f"{peak.source}; give the peak FLOP/s of a device"
    if model is None:
        return f"invalid: MFU above 1; {_CAUSES}"
    words = _in_words(model)
    if count.hardware is not None and hardware is None:
        return f"{words}; invalid: HFU above 1; {_CAUSES}"
    return words


def _in_words(share: float) -> str:
    if share > 0.50:
        return "very good: above 50%"
    if share > 0.43:
        return f"good: above the {_PUBLISHED}"
    if share >= 0.38:
        return f"good: in the {_PUBLISHED}"
    if share >= 0.25:
        return f"below the {_PUBLISHED}"
    return "usually misconfigured: below 25%"


def _definition(count: Count, peak: Peak) -> str:
    """All that the numbers depend on, in one line."""
    size = "unknown" if peak.flops is None else f"{peak.flops:g} FLOP/s a JAX device, "
    source = peak.source.removeprefix("unknown")
    return (
        "FLOPs a token x tokens per second / (devices x peak);"
        f" {count.definition}; peak: {size}{source}"
    )


def text(document: dict[str, Any]) -> str:
    """The document for a terminal."""
    peak = document["peak_flops"]
    model, hardware = document["model_flops_per_token"], document["hardware_flops_per_token"]
    return "\n".join(
        [
            f"MFU      {_shown(document['mfu'], model, peak)}",
            f"HFU      {_shown(document['hfu'], hardware, peak)}",
            f"peak     {'unknown' if peak is None else f'{peak:,.0f} FLOP/s a JAX device'}",
            textwrap.fill(f"reading  {document['reading']}", 96, subsequent_indent=" " * 9),
            "",
            textwrap.fill(document["definition"], 96),
        ]
    )


def _shown(share: float | None, flops: float | None, peak: float | None) -> str:
    if share is not None:
        return f"{share:.2%}"
    return "unknown" if flops is None or peak is None else "invalid"
