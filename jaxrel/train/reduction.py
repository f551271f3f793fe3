"""The two ways in which gradients of groups become one gradient.

`fast` is XLA's own collectives and a plain running sum. `invariant` adds the groups in one
balanced binary tree that is the same on every mesh: pairs of neighbours first, by
recursive halving over an axis and by nested loops of two over a device's own groups.
Addition commutes exactly, so only the shape of the tree matters, and that is fixed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Reduction:
    """How to sum over an axis of the mesh, over a device's groups, and over blocks."""

    scatter: Callable[[jax.Array, str, int, int], jax.Array]
    """(x, mesh axis, its size, array axis from the end) -> this device's part of the sum."""
    everywhere: Callable[[jax.Array, str, int], jax.Array]
    """(x, mesh axis, its size) -> the whole sum, on every device."""
    loops: Callable[[int], tuple[int, ...]]
    """Sizes of the nested loops that sum k local groups."""
    fence: Callable[[Any, jax.Array], Any]
    """(tree, opaque zero) -> the tree, each value rounded as if it had been stored."""
    compiler_options: dict[str, str]


def fold(x: jax.Array, axis: int = 0) -> jax.Array:
    """Sum over an axis by adding its second half to its first, again and again.

    The order is written out, so every compiler and every surrounding program keeps it;
    that of `jnp.sum` depends on what it is fused with.
    """
    while (size := x.shape[axis]) > 1:
        half = size // 2
        low, high = (lax.slice_in_dim(x, i * half, (i + 1) * half, axis=axis) for i in range(2))
        rest = lax.slice_in_dim(x, 2 * half, size, axis=axis)
        x = jnp.concatenate([low + high, rest], axis) if size % 2 else low + high
    return lax.squeeze(x, [axis])


def sum_over_groups(
    fn: Callable[[Any], tuple[Any, Any]], xs: Any, loops: Sequence[int], zero: Any
) -> tuple[Any, Any]:
    """Sum of `fn(x)[0]` over the leading axes `loops` of xs, and `fn(x)[1]` stacked over them.

    Each loop keeps one partial sum, started at `zero`: arrays of -0.0, the neutral element
    of floating-point addition (0.0 is not: it turns -0.0 into 0.0).
    """
    if not loops:
        return fn(xs)

    def body(acc: Any, x: Any) -> tuple[Any, Any]:
        part, aux = sum_over_groups(fn, x, loops[1:], zero)
        return jax.tree.map(jnp.add, acc, part), aux

    return lax.scan(body, zero, xs)


def opaque_zero(step: jax.Array) -> jax.Array:
    """Zero (uint32 []), from a step count that is never negative; the compiler cannot know."""
    return step.astype(jnp.uint32) >> 31


def _fence(tree: Any, zero: jax.Array) -> Any:
    """The bits, or-ed with a zero that the compiler does not know.

    XLA drops its own `optimization_barrier` before it fuses, and a multiplication fused
    with an addition is rounded once instead of twice. Which operations are fused depends on
    the collectives around them, and so on the mesh; through this nothing is contracted.
    (An exclusive or would do too, were it not that two of them cancel.)
    """

    def one(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        word = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        bits = lax.bitcast_convert_type(x, word) | zero.astype(word)
        return lax.bitcast_convert_type(bits, x.dtype)

    return jax.tree.map(one, lax.optimization_barrier(tree))


def _halving_scatter(x: jax.Array, name: str, size: int, axis: int) -> jax.Array:
    """Reduce-scatter by recursive halving, nearest neighbour first; device d gets chunk d."""
    if size == 1:
        return x
    rounds, me = size.bit_length() - 1, lax.axis_index(name)
    axis += x.ndim
    before, length, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    x = x.reshape(*before, *(2,) * rounds, length // size, *after)
    for r in range(rounds):
        bit, place = (me >> r) & 1, axis + rounds - 1 - r
        keep = lax.dynamic_index_in_dim(x, bit, place)
        send = lax.dynamic_index_in_dim(x, 1 - bit, place)
        x = keep + lax.ppermute(send, name, [(i, i ^ (1 << r)) for i in range(size)])
    return x.reshape(*before, length // size, *after)


def _doubling_sum(x: jax.Array, name: str, size: int) -> jax.Array:
    """All-reduce by recursive doubling, nearest neighbour first."""
    for r in range(size.bit_length() - 1):
        x = x + lax.ppermute(x, name, [(i, i ^ (1 << r)) for i in range(size)])
    return x


def _xla_scatter(x: jax.Array, name: str, size: int, axis: int) -> jax.Array:
    if size == 1:
        return x
    axis += x.ndim
    parts = x.reshape(*x.shape[:axis], size, -1, *x.shape[axis + 1 :])
    return lax.psum_scatter(jnp.moveaxis(parts, axis, 0), name)


def _xla_sum(x: jax.Array, name: str, size: int) -> jax.Array:
    return x if size == 1 else lax.psum(x, name)


FAST = Reduction(
    scatter=_xla_scatter,
    everywhere=_xla_sum,
    loops=lambda k: (k,) if k > 1 else (),
    fence=lambda tree, zero: tree,
    compiler_options={},
)

INVARIANT = Reduction(
    scatter=_halving_scatter,
    everywhere=_doubling_sum,
    loops=lambda k: (2,) * (k.bit_length() - 1),
    fence=_fence,
    # Common-subexpression elimination merges a recomputed layer with the first one where no
    # collective stands between them, which makes a one-device program differ from the rest.
    compiler_options={"xla_disable_hlo_passes": "cse"},
)

REDUCTIONS = {"fast": FAST, "invariant": INVARIANT}
