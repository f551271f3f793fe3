"""What kernels that no jaxpr shows compute: attention, by the shapes of its operands.

The mathematics of attention is two products forward, scores and values, and four backward.
That a backward kernel computes the scores once more is recomputation and does not count. Every
key is counted for every query, whatever the mask: see `scale` of `count_flops`.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

Estimator = Callable[[Any], int]
"""From an equation to the FLOPs of its contractions, over all that the equation computes; shapes
are at `eqn.invars[i].aval.shape` and `eqn.outvars[i].aval.shape`."""


def kernel_name(eqn: Any) -> str:
    """What an equation runs: the name of a Pallas kernel or of a foreign function, else of the
    primitive."""
    primitive = eqn.primitive.name
    if primitive == "pallas_call":
        return _source(eqn)[0]
    return eqn.params["target_name"] if primitive == "ffi_call" else primitive


def known_estimator(eqn: Any) -> Estimator | None:
    """The estimator of this room for an equation, if there is one.

    A Pallas kernel is known by its name and its file, so that a kernel of the same name
    elsewhere is not taken for it.
    """
    if eqn.primitive.name == "pallas_call":
        name, file = _source(eqn)
        for (pattern, end), estimator in _PALLAS.items():
            if re.fullmatch(pattern, name) and file.endswith(end):
                return estimator
    return _PRIMITIVES.get(eqn.primitive.name)


def _source(eqn: Any) -> tuple[str, str]:
    """The name of a Pallas kernel, its function's where it has none of its own, and its file."""
    name, _, place = eqn.params["jaxpr"].debug_info.func_src_info.partition(" at ")
    return name, place.rpartition(":")[0]


def _tpu_operands(eqn: Any) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]]:
    """Shapes of the queries and keys, and of all results, of a TPU attention kernel."""
    first = eqn.params["grid_mapping"].num_index_operands
    q, k = (v.aval.shape for v in eqn.invars[first : first + 2])
    return q, k, [v.aval.shape for v in eqn.outvars]


def _tpu_forward(eqn: Any) -> int:
    """Scores and values. q [..., heads, s, d], k [..., t, d] (or each pair turned), the result
    [..., heads, s, d of v]; other results are scratch and statistics."""
    q, k, results = _tpu_operands(eqn)
    out = next(shape for shape in results if len(shape) == len(q))
    rows, width = math.prod(out[:-1]), math.prod(q) // math.prod(out[:-1])
    return 2 * rows * _keys(k, width) * (width + out[-1])


def _tpu_dq(eqn: Any) -> int:
    """The gradient of the queries, from that of the scores."""
    q, k, results = _tpu_operands(eqn)
    out = next(shape for shape in results if len(shape) == len(q))
    return 2 * math.prod(out) * _keys(k, out[-1])


def _tpu_dkv(eqn: Any) -> int:
    """The gradients of scores, values and keys; of the queries too where the kernel is fused."""
    q, _, results = _tpu_operands(eqn)
    (*_, keys, width), (*_, width_v) = results[-2:]
    fused = any(len(shape) == len(q) + 1 for shape in results)
    return 2 * math.prod(q) // width * keys * (2 * width_v + width * (1 + fused))


def _keys(k: tuple[int, ...], width: int) -> int:
    return k[-1] * k[-2] // width


def _gpu(products: int, eqn: Any) -> int:
    """q [b, s, heads, d], k [b, t, heads, d]."""
    q, k = (v.aval.shape for v in eqn.invars[:2])
    return 2 * products * math.prod(q) * k[-3]


def _cudnn(products: int, eqn: Any) -> int:
    """q [b, s, heads, d], or [b, heads, s, d] where the layout says so; half of the products
    have the width of the queries, half that of the values."""
    q, k, v = (x.aval.shape for x in eqn.invars[:3])
    heads_first = int(eqn.params["layout"]) == 1
    keys = k[-2] if heads_first else k[-3]
    return products * math.prod(q[:-1]) * keys * (q[-1] + v[-1])


# By name, and by the end of the file's path.
_PALLAS: dict[tuple[str, str], Estimator] = {
    ("_flash_attention_kernel", "tpu/flash_attention.py"): _tpu_forward,
    ("_flash_attention_dq_kernel", "tpu/flash_attention.py"): _tpu_dq,
    ("_flash_attention_dkv_kernel", "tpu/flash_attention.py"): _tpu_dkv,
    (r"splash_m[hq]a_fwd_\w+", "splash_attention_kernel.py"): _tpu_forward,
    (r"splash_m[hq]a_dq_\w+", "splash_attention_kernel.py"): _tpu_dq,
    (r"splash_m[hq]a_dkv_\w+", "splash_attention_kernel.py"): _tpu_dkv,
    ("mha_forward", "gpu/attention.py"): partial(_gpu, 2),
    ("mha_backward", "gpu/attention.py"): partial(_gpu, 4),
}
_PRIMITIVES: dict[str, Estimator] = {
    "dot_product_attention_fwd_wrapper": partial(_cudnn, 2),
    "dot_product_attention_bwd_wrapper": partial(_cudnn, 4),
    "dot_product_attention_fp8_fwd_wrapper": partial(_cudnn, 2),
    "dot_product_attention_fp8_bwd_wrapper": partial(_cudnn, 4),
}
