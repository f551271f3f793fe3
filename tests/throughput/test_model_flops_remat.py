"""Recomputation is no mathematics: a checkpointed program counts as if it were not."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

from jaxrel.throughput import Count, count_flops

pytestmark = pytest.mark.core  # what a trace looks like is JAX's own business

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "everything": jax.checkpoint_policies.everything_saveable,
}
W, X = jax.ShapeDtypeStruct((6, 8, 8), jnp.float32), jax.ShapeDtypeStruct((5, 8), jnp.float32)
Wrap = Callable[[Any], Any]


def _feed_forward(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.tanh(checkpoint_name(jnp.sin(x @ w), "hidden") @ w.T)


def scan_of_remat(wrap: Wrap, w: jax.Array, x: jax.Array) -> jax.Array:
    block = wrap(lambda x, w: (_feed_forward(x, w), None))
    return jnp.sum(lax.scan(block, x, w)[0] ** 2)


def remat_of_scan(wrap: Wrap, w: jax.Array, x: jax.Array) -> jax.Array:
    scan = wrap(lambda x, w: lax.scan(lambda x, w: (_feed_forward(x, w), None), x, w)[0])
    return jnp.sum(scan(x, w) ** 2)


def nested(wrap: Wrap, w: jax.Array, x: jax.Array) -> jax.Array:
    inner = wrap(lambda x, w: (_feed_forward(x, w), None))
    outer = wrap(lambda x, w: (lax.scan(inner, x, w)[0], None))
    return jnp.sum(lax.scan(outer, x, w.reshape(2, 3, 8, 8))[0] ** 2)


def unrolled_in_jit(wrap: Wrap, w: jax.Array, x: jax.Array) -> jax.Array:
    block = jax.jit(wrap(_feed_forward))
    for layer in w:
        x = block(x, layer)
    return jnp.sum(x**2)


def batched(wrap: Wrap, w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.vmap(wrap(_feed_forward), in_axes=(None, 0))(x, w) ** 2)


def in_a_cond(wrap: Wrap, w: jax.Array, x: jax.Array) -> jax.Array:
    block = wrap(lambda x, w: lax.cond(x[0, 0] > 0, _feed_forward, lambda x, w: x, x, w))
    return jnp.sum(block(x, w[0]) ** 2)


def in_a_custom_vjp(wrap: Wrap, w: jax.Array, x: jax.Array) -> jax.Array:
    @jax.custom_vjp
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return _feed_forward(x, w)

    f.defvjp(
        lambda x, w: (_feed_forward(x, w), (x, w)),
        lambda saved, g: jax.vjp(wrap(_feed_forward), *saved)[1](g),
    )
    block = wrap(lambda x, w: (lax.optimization_barrier(f(x, w)), None))
    return jnp.sum(lax.scan(block, x, w)[0] ** 2)


PROGRAMS = [
    scan_of_remat,
    remat_of_scan,
    nested,
    unrolled_in_jit,
    batched,
    in_a_cond,
    in_a_custom_vjp,
]


def _gradient(program: Callable[..., Any], wrap: Wrap) -> Callable[..., Any]:
    return jax.value_and_grad(lambda w, x: program(wrap, w, x), argnums=(0, 1))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_number_is_that_of_the_program_without_checkpoints(
    program: Callable[..., Any], policy: str
) -> None:
    plain = count_flops(_gradient(program, lambda f: f), W, X)
    assert plain.model and plain.transcendental
    wrap = lambda f: jax.checkpoint(f, policy=POLICIES[policy])  # noqa: E731
    assert _numbers(count_flops(_gradient(program, wrap), W, X)) == _numbers(plain)


def _numbers(count: Count) -> tuple[Any, ...]:
    """All but the notes, which name lines."""
    fields = count.contraction, count.elementwise, count.transcendental, count.by_operation
    return (*fields, count.uncounted)


def test_the_checkpointed_count_by_hand() -> None:
    product = 2 * 5 * 8 * 8
    wrap = lambda f: jax.checkpoint(f)  # noqa: E731
    count = count_flops(_gradient(scan_of_remat, wrap), W, X)
    assert count.model == 6 * 2 * 3 * product  # layers, products of each, forward and backward


def _text(fn: Callable[..., Any]) -> str:
    return str(jax.make_jaxpr(fn)(W, X))


def test_a_count_leaves_real_traces_alone_and_is_not_misled_by_them() -> None:
    step = jax.jit(_gradient(unrolled_in_jit, jax.checkpoint))
    plain = count_flops(_gradient(unrolled_in_jit, lambda f: f), W, X)
    before = _text(step)  # traced, with checkpoints, before it is counted
    assert "differentiated=True" in before
    assert _numbers(count_flops(step, W, X)) == _numbers(plain)
    assert _text(step) == before

    other = jax.jit(_gradient(nested, jax.checkpoint))  # counted before it is traced
    count_flops(other, W, X)
    assert _text(other) == _text(jax.jit(_gradient(nested, jax.checkpoint)))
    assert "differentiated=True" in _text(other)


def test_another_thread_keeps_its_checkpoints_meanwhile() -> None:
    seen: list[str] = []

    def counted(w: jax.Array, x: jax.Array) -> Any:
        trace = lambda: seen.append(_text(_gradient(nested, jax.checkpoint)))  # noqa: E731
        thread = threading.Thread(target=trace)
        thread.start()
        thread.join()
        return _gradient(nested, jax.checkpoint)(w, x)

    plain = count_flops(_gradient(nested, lambda f: f), W, X)
    assert _numbers(count_flops(counted, W, X)) == _numbers(plain)
    assert "differentiated=True" in seen[0]


@pytest.mark.parametrize("program", [scan_of_remat, batched])  # inside a loop, and in the open
def test_recomputation_from_before_the_count_is_named(program: Callable[..., Any]) -> None:
    pulled = jax.make_jaxpr(_gradient(program, jax.checkpoint))(W, X)
    count = count_flops(jaxpr_as_fun(pulled), W, X)
    assert count.model is None
    assert {(u.name, u.reason) for u in count.uncounted} == {
        ("remat2", "recomputes; it was differentiated before it was counted")
    }


def test_an_error_while_tracing_leaves_checkpoints_as_they_were() -> None:
    with pytest.raises(TypeError):
        count_flops(lambda w, x: w @ x @ x, W, X)
    assert "differentiated=True" in _text(_gradient(nested, jax.checkpoint))


LAYERS, WIDTH, ROWS = 3, 16, 4
# Two products a layer, and each of them twice in the backward pass; x needs no gradient.
BY_HAND = 3 * LAYERS * 2 * (2 * ROWS * WIDTH * 2 * WIDTH) - 2 * ROWS * WIDTH * 2 * WIDTH
INPUT = jnp.ones((ROWS, WIDTH))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.down(jnp.tanh(self.up(x))))


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array, remat: bool) -> jax.Array:
        call = nnx.remat(NnxBlock.__call__) if remat else NnxBlock.__call__
        for block in self.blocks:
            x = call(block, x)
        return x


@pytest.mark.parametrize("remat", [False, True])
def test_an_nnx_model_is_counted_as_it_stands(remat: bool) -> None:
    model = NnxNet(nnx.Rngs(0))

    @nnx.jit
    def update_in_place(model: NnxNet, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.sum(m(x, remat) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model), grads))
        return loss

    assert count_flops(update_in_place, model, INPUT).model == BY_HAND
    assert all(isinstance(w, jax.Array) for w in jax.tree.leaves(nnx.state(model)))
    abstract = nnx.eval_shape(lambda: NnxNet(nnx.Rngs(0)))
    assert count_flops(update_in_place, abstract, INPUT).model == BY_HAND


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(linen.Dense(WIDTH)(jnp.tanh(linen.Dense(2 * WIDTH)(x))))


class LinenNet(linen.Module):
    remat: bool

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = (linen.remat(LinenBlock) if self.remat else LinenBlock)()(x)
        return x


@pytest.mark.parametrize("remat", [False, True])
def test_a_linen_model_is_counted_as_it_stands(remat: bool) -> None:
    net = LinenNet(remat)
    variables = jax.eval_shape(net.init, jax.random.key(0), INPUT)

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        outputs: Any = net.apply(variables, x)
        return jnp.sum(outputs**2)

    assert count_flops(jax.jit(jax.value_and_grad(loss)), variables, INPUT).model == BY_HAND


@pytest.mark.parametrize("remat", [False, True])
def test_an_equinox_model_is_counted_as_it_stands(remat: bool) -> None:
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    keys = jax.random.split(jax.random.key(0), LAYERS)
    blocks = [eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jnp.tanh, jnp.tanh, key=k) for k in keys]

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def step(blocks: Any, x: jax.Array) -> jax.Array:
        for block in blocks:
            x = jax.vmap(eqx.filter_checkpoint(block) if remat else block)(x)
        return jnp.sum(x**2)

    assert count_flops(step, blocks, INPUT).model == BY_HAND


def test_a_plain_function_is_counted_as_it_stands() -> None:
    def loss(layers: Any, x: jax.Array) -> jax.Array:
        for up, down in layers:
            x = jax.checkpoint(lambda x, up, down: jnp.tanh(jnp.tanh(x @ up) @ down))(x, up, down)
        return jnp.sum(x**2)

    layers = [(jnp.ones((WIDTH, 2 * WIDTH)), jnp.ones((2 * WIDTH, WIDTH)))] * LAYERS
    assert count_flops(jax.value_and_grad(loss), layers, INPUT).model == BY_HAND
