"""What library calls in compiled HLO compute, by their target's name.

Sources: XLA's `GpuHloCostAnalysis`, `cublas_cudnn.h` and `backend_configs.proto` for cuBLAS and
cuDNN, `onednn_config.proto` for oneDNN, JAX's `tpu_custom_call.py` for Mosaic. The forms for
NVIDIA and TPU are written from these documents and have not been run on such hardware.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

from jaxrel.throughput import contraction
from jaxrel.throughput.hlo_text import Instruction

Figure = Literal["contraction", "elementwise", "transcendental", "collective"]
FIGURES: tuple[Figure, ...] = ("contraction", "elementwise", "transcendental", "collective")


@dataclass(frozen=True)
class Estimate:
    """Operations of one call, on one device; None where they are unknown."""

    contraction: int | None = 0
    elementwise: int | None = 0
    transcendental: int | None = 0
    note: str = ""
    """What a reader of the figure must know."""


Estimator = Callable[[Instruction], Estimate]
"""Reads the shapes and attributes of a call. May raise: the call is then uncounted."""


def estimate(call: Instruction, own: Mapping[str, Estimator]) -> Estimate | None:
    """The operations of `call`, or None when nothing is known of it.

    Tried in order: the estimator in `own` under the call's exact target, the one known here, the
    cost estimate that the kernel's author wrote into its configuration (Pallas `cost_estimate`).
    """
    target = call.attributes["custom_call_target"].strip('"')
    if target in own:
        return own[target](call)
    for pattern, known in _KNOWN.items():
        if re.fullmatch(pattern, target):
            return known(call)
    return _declared(call)


def _declared(call: Instruction) -> Estimate | None:
    # JSON on TPU, an MLIR dictionary elsewhere: in both the figures stand between braces.
    config = call.attributes.get("backend_config", "").replace('\\"', '"')
    found = re.search(r"\bcost_estimate\"?\s*[:=]\s*\{([^}]*)\}", config)
    figures = dict(re.findall(r"(\w+)\"?\s*[:=]\s*\"?(\d+)", found[1])) if found else {}
    if "flops" not in figures:
        return None
    return Estimate(
        contraction=int(figures["flops"]),
        transcendental=int(figures.get("transcendentals", 0)),
        note="FLOPs as its author declares them, all taken for contractions",
    )


def _nothing(_: Instruction) -> Estimate:
    return Estimate()


def _no_contraction(_: Instruction) -> Estimate:
    return Estimate(elementwise=None, transcendental=None)


def _top_k(call: Instruction) -> Estimate:
    """A heap of k elements over each row: n log2(k) comparisons."""
    k = call.results[0].dims[-1]
    return Estimate(elementwise=call.inputs[0][0].size * max(1, (k - 1).bit_length()))


def _cublas(call: Instruction) -> Estimate:
    """Scaling and addition of a third matrix are left out, as XLA leaves them out."""
    numbers = _config(call, "gemm_backend_config")["dot_dimension_numbers"]
    contracted = [int(axis) for axis in numbers["lhs_contracting_dimensions"]]
    return Estimate(contraction.dot(call.inputs[0][0], call.results[0], contracted))


def _onednn_matmul(call: Instruction) -> Estimate:
    transposed = _config(call, "onednn_matmul_config").get("transpose_a", False)
    lhs = call.inputs[0][0]
    axis = len(lhs.dims) - (2 if transposed else 1)
    return Estimate(contraction.dot(lhs, call.results[0], [axis]))


def _cudnn_convolution(call: Instruction, order: tuple[int, int, int]) -> Estimate:
    """`order` picks image, kernel and output of the forward convolution from (a, b, result).

    A gradient has the products of the forward convolution, whose window and labels it states.
    Bias, activation and side input are left out, as XLA leaves them out.
    """
    arrays = (call.inputs[0][0], call.inputs[1][0], call.results[0])
    image, kernel, result = (arrays[place] for place in order)
    return Estimate(contraction.convolution(call, image, kernel, result))


def _cudnn_attention(call: Instruction) -> Estimate:
    """Forward: Q K' and P V. Backward: Q K' again, dV, dP, dQ and dK (Dao, arXiv 2205.14135)."""
    config = _config(call, "cudnn_fmha_backend_config")
    scores = prod(int(n) for n in config["intermediate_tensor_shape"]["dimensions"])
    backward = "Backward" in call.attributes["custom_call_target"]
    # The operands of both begin with Q, K and V.
    width_qk, width_v = call.inputs[0][0].dims[-1], call.inputs[2][0].dims[-1]
    products = 3 * width_qk + 2 * width_v if backward else width_qk + width_v
    mask = str(config.get("mask_type", "NO_MASK"))
    window = int(config.get("sliding_window_length", 0))
    full = mask in ("NO_MASK", "ALIBI") and not window
    note = "" if full else f"mask {mask}, window {window}: what the kernel skips is counted too"
    return Estimate(2 * scores * products, None, None, note)


def _config(call: Instruction, key: str) -> dict[str, Any]:
    return json.loads(call.attributes.get("backend_config", "{}")).get(key, {})


_KNOWN: Mapping[str, Estimator] = {
    # Marks that leave no work behind, and functions of the host.
    r"Sharding|SPMD\w+Shape|LayoutConstraint|annotate_device_placement": _nothing,
    r"MoveTo(Host|Device)|PinTo\w+|AllocateBuffer|AssumeGatherIndicesInBound": _nothing,
    r"xla(_ffi)?(_partitioned)?_python_(cpu|gpu)_callback": _nothing,
    r"(__gpu\$)?TopK": _top_k,
    r"__onednn\$matmul": _onednn_matmul,
    r"__onednn\$(softmax|layernorm)": _no_contraction,
    r"__cublas\$(gemm|lt\$matmul(\$f8)?)": _cublas,
    r"__cudnn\$conv(BiasActivation)?Forward(Graph)?": partial(_cudnn_convolution, order=(0, 1, 2)),
    r"__cudnn\$convBackwardInput": partial(_cudnn_convolution, order=(2, 1, 0)),
    r"__cudnn\$convBackwardFilter": partial(_cudnn_convolution, order=(0, 2, 1)),
    r"__cudnn\$fmha(ScaleBias)?Softmax(Dropout)?(F8)?(Backward)?(F8)?": _cudnn_attention,
    # Sorts, scans, normalisations and random bits.
    r"__cub\$\w+|__cudnn\$norm|(cu|hip)_threefry2x32(_ffi)?": _no_contraction,
}
"""Estimators by a regular expression for the whole target."""
