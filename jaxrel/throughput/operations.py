"""What one operation costs, from its shapes and its dimension numbers.

Contractions are exact. The rest follows XLA's cost analysis (`HloCostAnalysis`): one FLOP for
each element of an elementwise result, whatever its dtype, and transcendental functions apart.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from jaxrel.throughput.contraction import taps
from jaxrel.throughput.tally import Tally

# One FLOP for each element of the result.
_ELEMENTWISE = frozenset(
    """abs add add_any and ceil clamp clz complex conj div eq eq_to floor ge gt imag is_finite le
    le_to lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or population_count real
    reciprocal reduce_precision rem round select_n shift_left shift_right_arithmetic
    shift_right_logical sign square sub xor
    pmax pmin psum psum_invariant psum_invariant_start psum_start reduce_scatter
    reduce_scatter_start unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start
    unreduced_reduce_scatter unreduced_reduce_scatter_start""".split()
)

# One transcendental operation for each element of the result: XLA's own list, then the special
# functions, of which XLA makes polynomials.
_TRANSCENDENTAL = frozenset(
    """atan2 cbrt cos erf exp exp2 expm1 log log1p log2 logistic pow rsqrt sin sqrt tan tanh
    acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cosh digamma erf_inv erfc igamma
    igamma_grad_a igammac lgamma polygamma random_gamma regularized_incomplete_beta sinh
    zeta""".split()
)

# One FLOP less for each output than there are elements that go into it.
_REDUCTIONS = frozenset(
    """argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
    reduce_xor""".split()
)
_WINDOWED = frozenset(
    """reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
    select_and_scatter_add""".split()
)
_CUMULATIVE = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())
_SORTING = frozenset("approx_top_k sort top_k".split())
_SCATTERING = frozenset(
    """accum_grad_in_ref addupdate scatter-add scatter-max scatter-min scatter-mul
    scatter-sub""".split()
)

# They move or name data, talk to other devices or to the host, or draw random bits: no FLOPs.
_FREE = frozenset(
    """after_all all_gather all_gather_done all_gather_invariant all_gather_reduced
    all_gather_reduced_start all_gather_start all_to_all all_to_all_done all_to_all_start
    axis_index axis_size bitcast bitcast_convert_type broadcast_in_dim broadcast_to check
    concatenate copy copy_p create_token dce_sink debug_callback debug_print delay
    device_put dimension_size dma_start dma_wait dynamic_slice dynamic_update_slice empty
    empty2 empty_ref free_ref freeze from_edtype gather get get_barrier_semaphore get_global
    inspect_sharding iota iota_2x32_shape layout_constraint masked_load masked_swap
    multiple_of name new_ref num_programs optimization_barrier pad pbroadcast
    pbroadcast_done pbroadcast_dynamic pbroadcast_start philox2x32 philox4x32 pin
    platform_index ppermute ppermute_done ppermute_start precv preduced program_id psend
    psum_done pvary ragged_all_to_all random_bits random_clone random_fold_in random_seed
    random_split random_unwrap random_wrap reduce_scatter_done reduced_vary_cast
    reduced_vary_cast_p relayout repeat reshape reshard rev rng_bit_generator rng_uniform
    roll scatter semaphore_read semaphore_signal semaphore_wait shape_assertion
    sharding_constraint slice split squeeze stack stop_gradient swap threefry2x32
    threefry4x32 tie tile to_edtype transpose unpin unstack vary_unreduced_cast
    vary_unreduced_cast_p with_memory_space_constraint xla_metadata_value zeros_like""".split()
)


def cost(eqn: Any) -> Tally | None:
    """What an equation without a program inside costs; None for an operation not known here."""
    name = eqn.primitive.name
    if name in _CONTRACTIONS:
        return contraction(name, _CONTRACTIONS[name](eqn), [v.aval.dtype for v in eqn.invars[:2]])
    if name in _TRANSCENDENTAL:
        return Tally(transcendental=Fraction(_size(eqn.outvars[0])))
    flops = _other_flops(name, eqn)
    return None if flops is None else Tally(elementwise=Fraction(flops))


def contraction(name: str, multiply_adds: int, dtypes: Sequence[Any]) -> Tally:
    """A contraction of operands of `dtypes`: two FLOPs for each multiply-add, eight where both
    are complex; among integers they are operations, not FLOPs, and counted apart."""
    if all(jnp.issubdtype(d, jnp.complexfloating) for d in dtypes):
        return Tally(contraction={name: 8 * multiply_adds})
    if all(jnp.issubdtype(d, jnp.integer) or d == jnp.bool_ for d in dtypes):
        return Tally(
            integer=Fraction(2 * multiply_adds),
            notes={"contractions among integers are counted apart, in `integer`": None},
        )
    return Tally(contraction={name: 2 * multiply_adds})


def _other_flops(name: str, eqn: Any) -> int | None:
    out = _size(eqn.outvars[0]) if eqn.outvars else 0
    if name in _ELEMENTWISE:
        return sum(_size(v) for v in eqn.outvars)
    if name in _FREE:
        return 0
    if name == "convert_element_type":
        return out if eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype else 0
    if name == "integer_pow":
        return out * _multiplications(eqn.params["y"])
    if name in _REDUCTIONS:
        return _size(eqn.invars[0]) - out
    if name in _CUMULATIVE:
        return out - out // max(1, eqn.outvars[0].aval.shape[eqn.params["axis"]])
    if name in _WINDOWED:
        sources = _size(eqn.invars[0]) if name == "select_and_scatter_add" else out
        window = math.prod(eqn.params["window_dimensions"])
        return sources * (window if name == "select_and_scatter_add" else window - 1)
    if name in _SCATTERING:
        return _size(eqn.invars[2 if name.startswith("scatter") else 1])
    if name in _SORTING:
        shape, axis = eqn.invars[0].aval.shape, eqn.params.get("dimension", -1)
        return math.prod(shape) * max(0, shape[axis] - 1).bit_length()
    return None


def _size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def _multiplications(power: int) -> int:
    """Of x ** power by repeated squaring, and a division where it is negative."""
    bits = bin(abs(power))[2:]
    return max(0, len(bits) - 1 + bits.count("1") - 1) + (power < 0)


def _dot_general(eqn: Any) -> int:
    """Multiply-adds: elements of the result times the contracted sizes."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return _size(eqn.outvars[0]) * _extent(eqn.invars[0], contracted)


def _ragged_dot_general(eqn: Any) -> int:
    """As a dense product, but each row meets one group; a contracted ragged axis is cut among
    the groups of the result."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    dense = _size(eqn.outvars[0]) * _extent(eqn.invars[0], contracted)
    groups = math.prod(eqn.invars[2].aval.shape[-1:])
    return dense // groups if numbers.lhs_ragged_dimensions[0] in contracted else dense


def _scaled_matmul(eqn: Any) -> int:
    """[b, m, k] by [b, n, k]."""
    return _size(eqn.outvars[0]) * eqn.invars[0].aval.shape[-1]


def _extent(atom: Any, axes: Sequence[int]) -> int:
    return math.prod(atom.aval.shape[a] for a in axes)


def _convolution(eqn: Any) -> int:
    """Multiply-adds that meet an element of the input: none is counted on padding or in the
    holes of a dilation, as in XLA's cost analysis."""
    lhs, rhs, out = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    batch, features, *space = numbers.lhs_spec
    pairs = [
        taps(lhs[i], rhs[k], out[o], stride, low, base, window)
        for i, k, o, stride, (low, _), base, window in zip(
            space, numbers.rhs_spec[2:], numbers.out_spec[2:], p["window_strides"],
            p["padding"], p["lhs_dilation"], p["rhs_dilation"], strict=True,
        )
    ]  # fmt: skip
    channels = lhs[features] // p["feature_group_count"] * out[numbers.out_spec[1]]
    return channels * (lhs[batch] // p["batch_group_count"]) * math.prod(pairs)


_CONTRACTIONS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot_general,
    "scaled_dot": _dot_general,
    "scaled_matmul_wrapper": _scaled_matmul,
    "conv_general_dilated": _convolution,
}
