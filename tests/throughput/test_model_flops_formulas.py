"""Counts against formulas and tools that are not ours: the architecture's, and XLA's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from jaxrel.config import ModelConfig
from jaxrel.mesh.layout import BATCH_SPEC
from jaxrel.models import transformer
from jaxrel.throughput import count_flops
from jaxrel.train.step import make_train_step
from tests.train import toys

SIZES = [
    # layers, hidden, heads, kv_heads, head_dim, mlp, vocabulary; rows, sequence
    (1, 16, 2, 1, 8, 32, 50, 1, 8),
    (2, 32, 4, 2, 8, 48, 61, 3, 12),
    (4, 64, 4, 2, 16, 192, 256, 2, 64),
    (3, 48, 6, 6, 8, 100, 97, 4, 33),
    (6, 128, 8, 1, 16, 344, 512, 2, 128),
    (12, 768, 12, 12, 64, 3072, 50257, 8, 1024),  # GPT-2 small, with a gated feed-forward
    (24, 2048, 16, 8, 128, 5632, 32000, 4, 2048),
    (32, 4096, 32, 32, 128, 11008, 32000, 1, 4096),  # Llama 2 7B
    (80, 8192, 64, 8, 128, 28672, 128256, 1, 8192),  # Llama 3 70B
    (126, 16384, 128, 8, 128, 53248, 128256, 2, 8192),  # Llama 3 405B
]


def _forward(config: ModelConfig, rows: int, length: int) -> int:
    """Twice the multiply-adds of the reference model's architecture; no other contraction."""
    tokens, c = rows * length, config
    projections = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    feed_forward = 3 * c.hidden * c.mlp
    attention = 2 * c.heads * c.head_dim * length
    layers = c.layers * (projections + feed_forward + attention)
    return 2 * tokens * (layers + c.hidden * c.vocabulary)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("size", SIZES)
def test_the_reference_model_costs_what_its_architecture_says(
    size: tuple[int, ...], remat: Any
) -> None:
    *architecture, rows, length = size
    config = ModelConfig(*architecture, remat=remat, dropout=0.1, compute_dtype="bfloat16")
    loss = transformer.loss_fn(config)
    params = jax.eval_shape(transformer.init_fn(config), jax.random.key(0))
    batch = {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}
    key = jax.random.key(0)
    forward = count_flops(loss, params, batch, key)
    assert forward.model == _forward(config, rows, length)
    # Each product is made twice more, for its two operands.
    step = count_flops(jax.jit(jax.value_and_grad(loss, has_aux=True)), params, batch, key)
    assert step.model == 3 * _forward(config, rows, length)


def _attention(x: jax.Array, wq: jax.Array, wo: jax.Array) -> jax.Array:
    q = jnp.einsum("bsd,dhk->bshk", x, wq)
    scores = jnp.einsum("bqhk,bthk->bhqt", q, q) / 8
    weights = jax.nn.softmax(scores)
    return x + jnp.einsum("bhqt,bthk,hkd->bqd", weights, q, wo)


def _mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    mean, square = jnp.mean(x, -1, keepdims=True), jnp.mean(x**2, -1, keepdims=True)
    normed = (x - mean) * lax.rsqrt(square - mean**2 + 1e-6)
    return x + jax.nn.gelu(normed @ up) @ down


def _convolution(**options: Any) -> Callable[..., jax.Array]:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, k: lax.conv_general_dilated(x, k, dimension_numbers=numbers, **options)


def _floats(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _gradient(fn: Callable[..., Any], operands: int) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *x: jnp.sum(fn(*x) ** 2), argnums=tuple(range(operands)))


IMAGE, KERNEL = (2, 17, 23, 8), (3, 5, 8, 16)
PLAIN: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "product": (jnp.matmul, _floats((64, 128), (128, 32))),
    "batched": (jnp.matmul, _floats((5, 64, 128), (5, 128, 32))),
    "mlp": (_mlp, _floats((32, 64), (64, 256), (256, 64))),
    "attention": (_attention, _floats((2, 64, 64), (64, 4, 16), (4, 16, 64))),
    "same": (_convolution(window_strides=(1, 1), padding="SAME"), _floats(IMAGE, KERNEL)),
    "valid": (_convolution(window_strides=(2, 3), padding="VALID"), _floats(IMAGE, KERNEL)),
    "dilated": (
        _convolution(window_strides=(1, 1), padding=((4, 1), (0, 3)), rhs_dilation=(2, 3)),
        _floats(IMAGE, KERNEL),
    ),
    "transposed": (
        _convolution(window_strides=(1, 1), padding=((2, 2), (4, 4)), lhs_dilation=(2, 3)),
        _floats(IMAGE, KERNEL),
    ),
    "grouped": (
        _convolution(window_strides=(1, 1), padding="SAME", feature_group_count=4),
        _floats(IMAGE, (3, 5, 2, 16)),
    ),
    "elementwise": (lambda x, y: jnp.where(x > y, x * y + x, x / y) ** 3, _floats((9, 9), (9, 9))),
    "reduced": (
        lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + b, (0,)) + jnp.max(x, 0) - jnp.sum(x),
        _floats((99, 50)),
    ),
    "pooled": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
        _floats(IMAGE),
    ),
    "scattered": (lambda x, y: x.at[3:7].add(y), _floats((9, 5), (4, 5))),
}
WITH_GRADIENT = [n for n in PLAIN if n not in ("elementwise", "reduced", "pooled", "scattered")]


def _ours(fn: Callable[..., Any], args: list[Any]) -> int:
    count = count_flops(fn, *args)
    assert count.model is not None
    return count.model + count.elementwise


@pytest.mark.parametrize("name", WITH_GRADIENT)
@pytest.mark.parametrize("backward", [False, True])
def test_compiled_programs_agree_with_xla_to_one_percent(name: str, backward: bool) -> None:
    fn, args = PLAIN[name]
    fn = _gradient(fn, len(args)) if backward else fn
    reported: Any = jax.jit(fn).lower(*args).compile().cost_analysis()
    assert _ours(fn, args) == pytest.approx(reported["flops"], rel=0.01)


@pytest.mark.parametrize("name", PLAIN)
def test_programs_as_written_agree_with_xla(name: str) -> None:
    fn, args = PLAIN[name]
    reported: Any = jax.jit(fn).lower(*args).cost_analysis()
    count = count_flops(fn, *args)
    assert _ours(fn, args) == reported["flops"]
    assert count.transcendental == reported.get("transcendentals", 0)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("reduction", ["fast", "invariant"])
@pytest.mark.parametrize(("data", "fsdp", "groups"), [(1, 1, 8), (2, 4, 8), (8, 1, 8), (1, 4, 8)])
def test_a_whole_step_costs_the_same_on_any_mesh(
    data: int, fsdp: int, groups: int, reduction: Any, remat: Any
) -> None:
    config = ModelConfig(remat=remat)
    step = make_train_step(
        transformer.init_fn(config), transformer.loss_fn(config), optax.adamw(1e-3),
        toys.mesh(data, fsdp), groups=groups, reduction=reduction,
    )  # fmt: skip
    layout, rows, length = step.layout, 16, 32
    shape = layout.data, layout.local_groups, layout.fsdp, rows // groups, length + 1
    sharding = layout.sharding(BATCH_SPEC)
    batch = {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)}
    count = count_flops(step.jitted, step.abstract_state, batch)
    # Gathers, summation trees, taps, digests and the optimizer hold no product.
    flops = 3 * _forward(config, rows, length)
    assert (count.model, count.devices) == (flops, data * fsdp)
    assert count.per_device == flops / (data * fsdp)
