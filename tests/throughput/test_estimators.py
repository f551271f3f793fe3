"""Kernels: attention against its arithmetic (two products forward, four back), others by what
they or the user say, and the rest by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_mask,
)

from jaxrel.throughput import count_flops

pytestmark = pytest.mark.core  # what a trace looks like is JAX's own business

B, H, KV, S, T, D, DV = 3, 4, 2, 256, 512, 64, 128
SCORES, VALUES = 2 * B * H * S * T * D, 2 * B * H * S * T * DV
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _gradient(attention: Attention) -> Callable[..., Any]:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(attention(q, k, v).astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


@pytest.mark.parametrize("causal", [False, True])
def test_tpu_flash_attention(causal: bool) -> None:
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, causal=causal)

    shapes = _array(B, H, S, DV), _array(B, H, T, DV), _array(B, H, T, DV)
    forward = count_flops(attention, *shapes)
    assert (forward.model, forward.uncounted) == (2 * VALUES, ())
    assert list(forward.by_operation) == ["_flash_attention_kernel"]
    # The backward kernels compute the scores twice more, which is no mathematics.
    assert count_flops(_gradient(attention), *shapes).model == 6 * VALUES
    half = count_flops(attention, *shapes, scale={"_flash_attention_kernel": 0.5})
    assert half.model == VALUES


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", list(splash.QKVLayout))
@pytest.mark.parametrize("kv_heads", [(), (KV,)])
def test_tpu_splash_attention(kv_heads: tuple[int, ...], layout: Any, fused: bool) -> None:
    sizes = splash.BlockSizes(
        block_q=128, block_kv=128, block_kv_compute=128, block_q_dkv=128, block_kv_dkv=128,
        block_kv_dkv_compute=128, block_q_dq=None if fused else 128,
        block_kv_dq=None if fused else 128, use_fused_bwd_kernel=fused,
        q_layout=layout, k_layout=layout, v_layout=layout,
    )  # fmt: skip
    make = splash.make_splash_mha if kv_heads else splash.make_splash_mqa
    mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((S, T))] * H)
    kernel = make(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    shapes = _array(B, H, S, D), _array(B, *kv_heads, T, D), _array(B, *kv_heads, T, DV)
    attention: Any = jax.vmap(kernel)
    assert count_flops(attention, *shapes).model == SCORES + VALUES
    count = count_flops(_gradient(attention), *shapes)
    # Outside the kernels, the row sums of the softmax's gradient are written as a product.
    row_sums = 2 * B * H * S * DV
    assert (count.model, count.uncounted) == (3 * (SCORES + VALUES) + row_sums, ())
    assert count.by_operation["dot_general"] == row_sums


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gpu_pallas_attention() -> None:
    module = "jax.experimental.pallas.ops.gpu.attention"
    mha = pytest.importorskip(module, reason=f"this JAX has no {module}").mha

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return mha(q, k, v, None, interpret=True)

    shapes = _array(B, S, H, D), _array(B, S, H, D), _array(B, S, H, D)
    products = 2 * B * H * S * S * D
    assert count_flops(attention, *shapes).model == 2 * products
    assert count_flops(_gradient(attention), *shapes).model == 6 * products


@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_attention_through_jax_nn(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the look at the machine is left out: nothing is compiled here.
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

    q, k = _array(B, S, H, D, dtype=jnp.bfloat16), _array(B, T, KV, D, dtype=jnp.bfloat16)
    assert count_flops(attention, q, k, k).model == 2 * SCORES
    # Against the same attention as plain JAX.
    xla = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="xla")  # noqa: E731
    count = count_flops(_gradient(attention), q, k, k)
    assert count.model == 6 * SCORES == count_flops(_gradient(xla), q, k, k).model
    name = "dot_product_attention_fwd_wrapper"
    assert count_flops(attention, q, k, k, scale={name: 0.5}).model == SCORES


@pytest.mark.parametrize(
    "axes", [("btnh", cudnn.AttentionLayout.BTNH), ("bnth", cudnn.AttentionLayout.BNTH)]
)
def test_cudnn_layouts(axes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)
    sizes = {"b": B, "n": H, "h": D}
    q = _array(*[sizes.get(a, S) for a in axes[0]], dtype=jnp.bfloat16)
    k = _array(*[sizes.get(a, T) for a in axes[0]], dtype=jnp.bfloat16)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return cudnn.dot_product_attention(q, k, v, qkv_layout=axes[1].name)  # type: ignore

    assert count_flops(attention, q, k, k).model == 2 * SCORES


def test_a_kernel_of_the_same_name_elsewhere_is_not_taken_for_it() -> None:
    def mha_forward(x: Any, out: Any) -> None:
        out[...] = x[...] @ x[...]

    def run(x: jax.Array) -> jax.Array:
        return pl.pallas_call(mha_forward, out_shape=_array(8, 8), interpret=True)(x)

    assert count_flops(run, _array(8, 8)).model == 2 * 8 * 8 * 8


@pytest.mark.parametrize(("estimate", "expected"), [(None, 2 * 8 * 8 * 16), (777, 777)])
def test_a_pallas_kernel_counts_by_its_estimate_or_its_body(
    estimate: int | None, expected: int
) -> None:
    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = x[...] @ y[...]

    declared = (
        pl.CostEstimate(flops=estimate, transcendentals=5, bytes_accessed=9) if estimate else None
    )

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            out_shape=_array(8, 8),
            grid=(2, 4),
            in_specs=[
                pl.BlockSpec((4, 16), lambda i, j: (i, 0)),
                pl.BlockSpec((16, 2), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((4, 2), lambda i, j: (i, j)),
            cost_estimate=declared,
            interpret=True,
            name="tiles",
        )(x, y)

    count = count_flops(product, _array(8, 16), _array(16, 8))
    assert count.model == expected
    assert count.transcendental == (5 if estimate else 0)
    assert any(note.startswith("tiles: ") for note in count.notes)
    own = count_flops(product, _array(8, 16), _array(16, 8), estimators={"tiles": lambda eqn: 5})
    assert own.by_operation == {"tiles": 5}


def test_what_is_not_known_is_named_with_its_place() -> None:
    count = count_flops(lambda x: jnp.linalg.eigh(x)[0] @ x, _array(4, 4))
    assert count.model is None and count.contraction == 2 * 4 * 4
    assert [u.name for u in count.uncounted] == ["eigh"]
    assert "test_estimators.py" in count.uncounted[0].where
    # What never runs, or is declared to be nothing, is not missed.
    never = lambda x: lax.fori_loop(0, 0, lambda _, x: jnp.linalg.eigh(x)[1], x)  # noqa: E731
    assert count_flops(never, _array(4, 4)).model == 0
    nothing = count_flops(lambda x: jnp.linalg.eigh(x)[0] @ x, _array(4, 4), scale={"eigh": 0})
    assert nothing.model == 2 * 4 * 4
    foreign = jax.ffi.ffi_call("their_kernel", _array(4, 4))
    assert [u.name for u in count_flops(foreign, _array(4, 4)).uncounted] == ["their_kernel"]
    given = count_flops(foreign, _array(4, 4), estimators={"their_kernel": lambda eqn: 12})
    assert (given.model, given.by_operation) == (12, {"their_kernel": 12})
