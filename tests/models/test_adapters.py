"""Models in NNX and Linen, as two functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxrel.exit_codes import UsageError
from jaxrel.models.adapters import from_linen, from_nnx

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
BATCH = {"x": X, "y": np.sin(X.sum(axis=1, keepdims=True))}


class NNXModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.1) -> None:
        self.layers = nnx.List([nnx.Linear(4, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)])
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](self.dropout(nnx.relu(self.norm(self.layers[0](x)))))


class LinenModel(linen.Module):
    rate: float = 0.1

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.relu(linen.LayerNorm()(linen.Dense(32)(x)))
        return linen.Dense(1)(linen.Dropout(self.rate, deterministic=False)(x))


def squared_error(module: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    error = module(batch["x"]) - batch["y"]
    return jnp.mean(jnp.square(error)), {"largest": jnp.max(jnp.abs(error))}


def adapted(kind: str, rate: float = 0.1, loss: Any = squared_error) -> Any:
    if kind == "nnx":
        return from_nnx(lambda rngs: NNXModel(rngs, rate), loss)
    return from_linen(LinenModel(rate), loss, BATCH)


@pytest.mark.core
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_toy_learns(kind: str) -> None:
    init_fn, loss_fn = adapted(kind)
    params = jax.jit(init_fn)(KEY)
    assert {type(x) for x in jax.tree.leaves(params)} == {type(jnp.ones(1))}
    assert sum(x.size for x in jax.tree.leaves(params)) == 4 * 32 + 32 + 32 + 1 + 2 * 32
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, BATCH, key)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss, metrics

    state, losses = optimizer.init(params), []
    for i in range(60):
        params, state, loss, metrics = step(params, state, jax.random.fold_in(KEY, i))
        losses.append(float(loss))
        assert metrics["largest"] > 0
    assert np.mean(losses[-5:]) < 0.5 * losses[0]


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_noise_is_a_function_of_the_key(kind: str) -> None:
    init_fn, loss_fn = adapted(kind, rate=0.5)
    params, loss_fn = init_fn(KEY), jax.jit(loss_fn)
    losses = [float(loss_fn(params, BATCH, jax.random.key(k))[0]) for k in (1, 2, 1)]
    assert losses[0] == losses[2] != losses[1]
    _, still = adapted(kind, rate=0.0)
    assert still(params, BATCH, jax.random.key(1))[0] == still(params, BATCH, jax.random.key(2))[0]


def test_the_module_computes_what_it_computes_alone() -> None:
    init_fn, loss_fn = adapted("nnx", rate=0.0)
    alone = NNXModel(nnx.Rngs(KEY), rate=0.0)
    assert loss_fn(init_fn(KEY), BATCH, KEY)[0] == squared_error(alone, BATCH)[0]
    init_fn, loss_fn = adapted("linen", rate=0.0)
    params = init_fn(KEY)
    y = LinenModel(0.0).apply({"params": params}, X)
    assert loss_fn(params, BATCH, KEY)[0] == jnp.mean(jnp.square(y - BATCH["y"]))


def test_every_stream_draws_noise_of_its_own() -> None:
    """Two dropouts of one module, and one below a stack of layers."""

    class Noise(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.one = nnx.Dropout(0.5, rngs=rngs)
            self.two = nnx.Dropout(0.5, rngs=rngs)
            stacked = nnx.split_rngs(splits=3)(nnx.vmap(lambda r: nnx.Dropout(0.5, rngs=r)))
            self.stacked = stacked(rngs)

    class LinenNoise(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> Any:
            return [
                linen.Dropout(0.5, deterministic=False, rng_collection=name)(x)
                for name in ("dropout", "dropout", "other")
            ]

    def draw(module: Any, x: jax.Array) -> Any:
        stacked = nnx.vmap(lambda d, x: d(x), in_axes=(0, None))(module.stacked, x)
        return jnp.zeros(()), [module.one(x), module.two(x), *stacked]

    def draw_linen(module: Any, x: jax.Array) -> Any:
        return jnp.zeros(()), module(x)

    ones = jnp.ones(64)
    for _, loss_fn in (from_nnx(Noise, draw), from_linen(LinenNoise(), draw_linen, ones)):
        drawn = np.stack(loss_fn({}, ones, KEY)[1])
        assert len(np.unique(drawn, axis=0)) == len(drawn)
        assert np.array_equal(drawn, np.stack(loss_fn({}, ones, KEY)[1]))


def test_a_loss_alone_has_no_metrics() -> None:
    for kind in ("nnx", "linen"):
        init_fn, loss_fn = adapted(kind, loss=lambda m, b: squared_error(m, b)[0])
        assert loss_fn(init_fn(KEY), BATCH, KEY)[1] == {}


@pytest.mark.core
def test_state_beside_the_parameters_is_refused() -> None:
    class Normed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.BatchNorm(4, rngs=rngs)

    class Table(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.table = jnp.arange(4.0)

    class LinenNormed(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.BatchNorm(use_running_average=False)(x)

    def loss(module: Any, batch: Any) -> jax.Array:
        return jnp.sum(module(batch["x"]))

    cases = {
        "norm.mean (BatchStat)": lambda: from_nnx(Normed, loss),
        "table (array)": lambda: from_nnx(Table, loss),
        "batch_stats (a collection)": lambda: from_linen(LinenNormed(), loss, BATCH),
    }
    for name, build in cases.items():
        with pytest.raises(UsageError) as refused:
            build()
        assert str(refused.value).startswith(f"model: {name} is state beside the parameters")
        assert "\n" not in str(refused.value)


def test_partitioned_linen_parameters_come_unboxed() -> None:
    class Named(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            kernel = linen.with_partitioning(linen.initializers.ones, ("embed", "mlp"))
            return linen.Dense(2, kernel_init=kernel)(x)

    init_fn, loss_fn = from_linen(Named(), lambda m, b: jnp.sum(m(b["x"])), BATCH)
    params = init_fn(KEY)
    assert params["Dense_0"]["kernel"].shape == (4, 2)
    np.testing.assert_allclose(loss_fn(params, BATCH, KEY)[0], 2 * X.sum(), rtol=1e-4)
