"""Sums in an order that is written down."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrel.train import reduction
from jaxrel.train.reduction import INVARIANT, REDUCTIONS, fold, opaque_zero, sum_over_groups
from tests.train import toys

X = np.random.default_rng(0).normal(size=(8, 16, 3)).astype(np.float32)


def tree(xs: Any) -> np.ndarray:
    """Balanced binary tree of neighbours, by NumPy."""
    xs = list(xs)
    while len(xs) > 1:
        xs = [a + b for a, b in zip(xs[::2], xs[1::2], strict=True)]
    return xs[0]


@pytest.mark.core
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_halving_and_doubling_add_in_the_order_of_the_tree(size: int) -> None:
    mesh = toys.mesh(1, size)
    wanted = tree(X[:size])

    def both(x: jax.Array) -> Any:
        part = INVARIANT.scatter(x[0], "fsdp", size, -2)
        return part, INVARIANT.everywhere(x[0], "fsdp", size)[None]

    part, whole = jax.jit(
        jax.shard_map(
            both, mesh=mesh, in_specs=P("fsdp"), out_specs=(P("fsdp"), P("fsdp")), check_vma=False
        )
    )(X[:size])
    np.testing.assert_array_equal(part, wanted)
    for copy in whole:
        np.testing.assert_array_equal(copy, wanted)


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("name", ["invariant", "fast"])
def test_loops_sum_groups_and_keep_their_other_values_in_order(k: int, name: str) -> None:
    loops = REDUCTIONS[name].loops(k)
    xs = jnp.asarray(X[:k]).reshape(*loops, *X.shape[1:])
    zero = jnp.full(X.shape[1:], -0.0, jnp.float32)
    total, aux = sum_over_groups(lambda x: (x, x[0, 0]), xs, loops, zero)
    np.testing.assert_array_equal(np.ravel(aux), X[:k, 0, 0])
    if name == "invariant":
        np.testing.assert_array_equal(total, tree(X[:k]))
    else:
        np.testing.assert_allclose(total, X[:k].sum(0), rtol=1e-5, atol=1e-6)


def test_a_sum_of_negative_zeros_stays_negative() -> None:
    xs = jnp.full((4, 1), -0.0)
    total, _ = sum_over_groups(lambda x: (x, ()), xs.reshape(2, 2, 1), (2, 2), jnp.full(1, -0.0))
    assert np.signbit(total).all()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100])
def test_fold(size: int) -> None:
    x = np.random.default_rng(size).normal(size=(size, 2)).astype(np.float32)
    exact = [float(sum(map(Fraction, map(float, x[:, i])))) for i in range(2)]
    np.testing.assert_allclose(fold(jnp.asarray(x)), exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(fold(jnp.asarray(x)), jax.jit(fold)(x))
    np.testing.assert_array_equal(fold(jnp.asarray(x.T), axis=1), fold(jnp.asarray(x)))


@pytest.mark.core
def test_a_fence_keeps_bits_and_stops_contraction() -> None:
    zero = opaque_zero(jnp.int32(7))
    assert int(zero) == 0
    odd = jnp.array([np.nan, -0.0, np.inf, 1e-45, -3.5], jnp.float32)
    for x in (odd, odd.astype(jnp.bfloat16)):
        kept = INVARIANT.fence(x, zero)
        assert kept.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(kept).view(np.uint8), np.asarray(x).view(np.uint8))
    # a*b + c with a*b rounded first, in every element: what no fused multiply-add gives.
    a, b, c = (np.random.default_rng(i).normal(size=4096).astype(np.float32) for i in range(3))

    @jax.jit
    def fenced(a: Any, b: Any, c: Any, step: Any) -> Any:
        return INVARIANT.fence(a * b, opaque_zero(step)) + c

    np.testing.assert_array_equal(fenced(a, b, c, jnp.int32(1)), a * b + c)


def test_there_are_two_reductions() -> None:
    assert {"fast", "invariant"} == set(REDUCTIONS)
    assert reduction.FAST.fence({"x": 1}, jnp.uint32(0)) == {"x": 1}
