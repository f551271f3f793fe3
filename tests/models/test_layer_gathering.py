"""A gathered layer lives for one layer: no remat policy keeps it for the backward pass."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxrel.config import ModelConfig
from jaxrel.gather import Shard, gather, remat_policy
from jaxrel.models import transformer

CONFIG = ModelConfig(
    layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=48, vocabulary=64, dropout=0.1
)
KEY = jax.random.key(3)
# The compiler's optimizations would be most of the time of these tests.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
TOKENS = np.random.default_rng(0).integers(0, 64, (5, 8), np.int32)  # sizes that no weight has


def _collect(value: jax.Array, probe: jax.Array, dtype: Any) -> jax.Array:
    """The gather of a step, in its simplest form; the last axis is sharded."""
    value = value if dtype is None else value.astype(dtype)
    return lax.all_gather(value, "fsdp", axis=value.ndim - 1, tiled=True)


def _collect_backward(dtype: Any, _: None, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    g = g.astype(jnp.float32)
    own = lax.psum_scatter(g, "fsdp", scatter_dimension=g.ndim - 1, tiled=True)
    return own, jnp.sum(jnp.square(g))


collect = jax.custom_vjp(_collect, nondiff_argnums=(2,))
collect.defvjp(lambda v, p, dtype: (_collect(v, p, dtype), None), _collect_backward)


def sharded_step(config: ModelConfig, params: Any) -> Any:
    """(params, tokens) -> (loss, (gradients, squared norms by layer)) on two devices."""
    loss_fn = transformer.loss_fn(config)

    def step(params: Any, tokens: jax.Array) -> Any:
        def loss(params: Any, probe: jax.Array) -> jax.Array:
            shards = jax.tree.map(lambda x: Shard(x, probe, collect), params["layers"])
            return loss_fn({**params, "layers": shards}, {"tokens": tokens}, KEY)[0]

        return jax.value_and_grad(loss, argnums=(0, 1))(params, jnp.zeros(config.layers))

    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    specs = {k: jax.tree.map(lambda _: P(), v) for k, v in params.items()}
    specs["layers"] = jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), "fsdp"), params["layers"])
    out = (P(), (specs, P()))
    return jax.shard_map(step, mesh=mesh, in_specs=(specs, P()), out_specs=out, check_vma=False)


def scans(jaxpr: Any) -> Iterator[Any]:
    """Every scan below a jaxpr, in order of execution."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        else:
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from scans(inner)


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_no_gathered_layer_is_kept(remat: Any, dtype: Any) -> None:
    config = replace(CONFIG, remat=remat, compute_dtype=dtype)
    params = jax.eval_shape(transformer.init_fn(config), KEY)
    jaxpr = jax.make_jaxpr(sharded_step(config, params))(params, TOKENS)
    forward, backward = scans(jaxpr.jaxpr)
    leaves = jax.tree.leaves(params["layers"])
    whole = {leaf.size // config.layers for leaf in leaves}
    kept = {math.prod(v.aval.shape[1:]) for v in forward.outvars}
    assert not kept & whole
    for scan in (forward, backward):  # gathered once more in the backward pass
        assert str(scan.params["jaxpr"]).count("= all_gather[") == len(leaves)


@pytest.mark.core
def test_shards_give_the_loss_and_gradients_of_whole_parameters() -> None:
    params = jit(transformer.init_fn(CONFIG))(KEY)
    loss, (grads, squares) = jit(sharded_step(CONFIG, params))(params, TOKENS)
    whole_loss, whole_grads = jit(
        jax.value_and_grad(
            lambda p: transformer.loss_fn(CONFIG)(p, {"tokens": jnp.asarray(TOKENS)}, KEY)[0]
        )
    )(params)
    assert float(loss) == pytest.approx(float(whole_loss), rel=1e-6)
    # Both devices took the same rows, so the sum over them is twice the gradient.
    grads["layers"] = jax.tree.map(lambda g: g / 2, grads["layers"])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, whole_grads
    )
    expected = sum(
        jnp.sum(jnp.square(g), axis=range(1, g.ndim))
        for g in jax.tree.leaves(whole_grads["layers"])
    )
    np.testing.assert_allclose(squares, expected, rtol=1e-4)


USES = {
    "as it is": lambda x, w: x @ w,
    "cast": lambda x, w: x @ w.astype(jnp.float32),
    "transposed": lambda x, w: x @ w.T,
    "halves": lambda x, w: jnp.concatenate([x @ h for h in jnp.split(w, 2, axis=1)], axis=1),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_a_layer_is_not_kept_however_it_is_used(use: Any, trained: bool) -> None:
    """Models of users recast and rearrange what they gather, and may not train all of it."""

    @partial(jax.checkpoint, policy=remat_policy("none"), prevent_cse=False)
    def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jnp.sin(use(x, gather(w, jnp.bfloat16))).astype(jnp.float32), None

    def loss(x: jax.Array, w: jax.Array, probe: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(block, x, Shard(w, probe, collect))[0])

    weight = P(None, None, "fsdp")
    step = jax.shard_map(
        jax.grad(loss, argnums=(0, 1) if trained else (0,)),
        mesh=jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,)),
        in_specs=(P(), weight, P()),
        out_specs=(P(), weight) if trained else (P(),),
        check_vma=False,
    )
    arguments = jnp.ones((5, 16)), jnp.ones((3, 16, 16)), jnp.zeros(3)
    forward, _ = scans(jax.make_jaxpr(step)(*arguments).jaxpr)
    kept = [math.prod(v.aval.shape[1:]) for v in forward.outvars]
    assert 5 * 16 in kept and not {16 * 16, 16 * 8} & set(kept)
