"""Steps with one part taken out or replaced, to name what a difference is made of.

Parts are replaced from outside, for the time in which a step is traced: the library has no
switches for them. An ablated step is for measuring only; most no longer keep a promise.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from jax import lax

from jaxrel.train import backward, reduction, step

Patch = Callable[[], AbstractContextManager[Any]]


class _LaxWithoutBranch:
    """`jax.lax` whose `cond` always takes its first branch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lax, name)

    def cond(self, _: Any, first: Callable[[Any], Any], __: Any, operands: Any) -> Any:
        return first(operands)


def _no_digest(tree: Any, *_: Any) -> tuple[jax.Array, jax.Array]:
    leaves = len(jax.tree.leaves(tree))
    return jnp.zeros((leaves, 2), jnp.uint32), jnp.zeros(leaves, jnp.uint32)


_report = backward._report


def _report_without_taps(layout: Any, leaves: Any, grads: Any, aux: Any, *rest: Any) -> Any:
    """Group norms are zero, so the compiler drops the squares that fed them."""
    loss, square, metrics = aux
    return _report(layout, leaves, grads, (loss, jnp.zeros_like(square), metrics), *rest)


def _plain_square(layout: Any, leaves: Any, grads: Any, *_: Any) -> jax.Array:
    """The squared global norm in the compiler's own order."""
    divided, replicated = jnp.float32(0), jnp.float32(0)
    flat = jax.tree.leaves(leaves, is_leaf=backward._is_layout)
    for leaf, g in zip(flat, jax.tree.leaves(grads), strict=True):
        if leaf.axis is None:
            replicated += jnp.sum(g * g)
        else:
            divided += jnp.sum(g * g)
    return replicated + lax.psum(divided, ("data", "fsdp"))


def _scatter_by_all_reduce(x: jax.Array, name: str, size: int, axis: int) -> jax.Array:
    """All-reduce, then this device's slice: what XLA makes of shardings on CPU."""
    if size == 1:
        return x
    length = x.shape[axis] // size
    at = lax.axis_index(name) * length
    return lax.dynamic_slice_in_dim(lax.psum(x, name), at, length, axis + x.ndim)


def _reduce_by(kind: str, **parts: Any) -> Patch:
    return lambda: patch.dict(
        reduction.REDUCTIONS, {kind: replace(reduction.REDUCTIONS[kind], **parts)}
    )


_DIGEST: Patch = lambda: patch.object(step, "sharded_tree_words", _no_digest)  # noqa: E731
_TAPS: Patch = lambda: patch.object(backward, "_report", _report_without_taps)  # noqa: E731
_BRANCH: Patch = lambda: patch.object(step, "lax", _LaxWithoutBranch())  # noqa: E731
_NORM: Patch = lambda: patch.object(backward, "_global_square", _plain_square)  # noqa: E731
_ALL_REDUCE = _reduce_by("fast", scatter=_scatter_by_all_reduce)
_FAST = reduction.FAST

ABLATIONS: dict[str, tuple[str, tuple[Patch, ...]]] = {
    "fast, no digest": ("fast", (_DIGEST,)),
    "fast, no taps": ("fast", (_TAPS,)),
    "fast, no finite branch": ("fast", (_BRANCH,)),
    "fast, norm by jnp.sum": ("fast", (_NORM,)),
    "fast, none of these four": ("fast", (_DIGEST, _TAPS, _BRANCH, _NORM)),
    "fast, all-reduce for reduce-scatter": ("fast", (_ALL_REDUCE,)),
    "invariant, XLA's collectives": (
        "invariant",
        (_reduce_by("invariant", scatter=_FAST.scatter, everywhere=_FAST.everywhere),),
    ),
    "invariant, CSE on": ("invariant", (_reduce_by("invariant", compiler_options={}),)),
    "invariant, one plain loop": ("invariant", (_reduce_by("invariant", loops=_FAST.loops),)),
    "invariant, no fences": ("invariant", (_reduce_by("invariant", fence=_FAST.fence),)),
}
"""Name -> (reduction, what is replaced while the step is made and traced)."""


def ablated(name: str) -> AbstractContextManager[Any]:
    """The context in which to make and lower the step of `ABLATIONS[name]`."""
    stack = ExitStack()
    for make in ABLATIONS[name][1]:
        stack.enter_context(make())
    return stack
