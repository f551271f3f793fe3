"""Programs against a count by hand; the arithmetic stands beside each."""

from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrel.exit_codes import UsageError
from jaxrel.throughput import count_flops

pytestmark = pytest.mark.core  # what a trace looks like is JAX's own business


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_product_is_two_flops_for_each_multiply_add() -> None:
    count = count_flops(lambda a, b: jnp.tanh(a @ b) + 1, array(3, 5), array(5, 7))
    assert count.model == count.contraction == 2 * 3 * 7 * 5
    assert count.by_operation == {"dot_general": 2 * 3 * 7 * 5}
    assert (count.elementwise, count.transcendental) == (3 * 7, 3 * 7)
    assert (count.uncounted, count.integer, count.devices) == ((), 0, 1)


def test_an_einsum_with_batch_dimensions() -> None:
    count = count_flops(
        lambda a, b: jnp.einsum("bhqd,bhkd->bhqk", a, b), array(2, 3, 5, 7), array(2, 3, 11, 7)
    )
    assert count.model == 2 * (2 * 3) * 5 * 11 * 7


def test_vmap_multiplies_by_its_axis() -> None:
    count = count_flops(jax.vmap(jnp.matmul), array(6, 3, 4), array(6, 4, 5))
    assert count.model == 6 * (2 * 3 * 5 * 4)


def _layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ w), None


def _scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(lax.scan(_layer, x, w)[0])


def _unrolled(w: jax.Array, x: jax.Array) -> jax.Array:
    for layer in w:
        x, _ = _layer(x, layer)
    return jnp.sum(x)


def test_a_scan_counts_its_length_and_agrees_with_its_unrolled_twin() -> None:
    shapes = array(8, 16, 16), array(4, 16)
    layer = 2 * 4 * 16 * 16
    for form in (_scanned, _unrolled):
        assert count_flops(form, *shapes).model == 8 * layer
        # Backward: the gradient of each layer's weights, and that of its input.
        assert count_flops(jax.grad(form, argnums=(0, 1)), *shapes).model == 8 * 3 * layer
        # The first layer's input needs no gradient. A scan computes it all the same.
        last = 8 * 3 * layer - (layer if form is _unrolled else 0)
        assert count_flops(jax.grad(form), *shapes).model == last


def test_nested_scans_multiply() -> None:
    def outer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0], None

    count = count_flops(lambda w, x: lax.scan(outer, x, w)[0], array(5, 4, 4), array(2, 4))
    assert count.model == 5 * 3 * (2 * 2 * 4 * 4)


SQUARE = array(4, 4)
PRODUCT = 2 * 4 * 4 * 4


@pytest.mark.parametrize(
    ("low", "high"), [(0, 6), (np.int32(2), np.int32(8)), (0, jnp.int32(6)), (jnp.int32(-1), 5)]
)
def test_a_fori_loop_of_known_bounds_is_exact(low: Any, high: Any) -> None:
    count = count_flops(lambda x: lax.fori_loop(low, high, lambda _, x: x @ x, x), SQUARE)
    assert count.model == 6 * PRODUCT


def test_a_bound_is_followed_through_jit_and_scan() -> None:
    @jax.jit
    def loop(x: jax.Array, n: jax.Array) -> jax.Array:
        return lax.fori_loop(0, jnp.minimum(n, 5) * 2, lambda _, x: x @ x, x)

    def turns(x: jax.Array) -> jax.Array:
        n = jnp.int32(3)
        return lax.scan(lambda x, _: (loop(x, n), None), x, None, length=4)[0]

    assert count_flops(turns, SQUARE).model == 4 * 6 * PRODUCT
    assert count_flops(loop, SQUARE, 7).model == 10 * PRODUCT


def test_a_while_of_any_known_counter_is_followed() -> None:
    def body(state: Any) -> Any:
        i, x, other = state
        return i * 2 + 1, x @ x, other + 1

    # i = 0, 1, 3, 7, 15, 31 | 63: six turns.
    count = count_flops(
        lambda x: lax.while_loop(lambda s: s[0] < 63, body, (0, x, jnp.zeros(3)))[1:], SQUARE
    )
    assert count.model == 6 * PRODUCT
    # Seven comparisons; in each turn two operations on the counter and one on each of `other`.
    assert count.elementwise == 7 + 6 * (2 + 3)


def test_a_while_that_depends_on_data_is_uncounted_by_name() -> None:
    def program(x: jax.Array) -> jax.Array:
        x = x @ x
        return lax.while_loop(lambda x: jnp.sum(x) < 100, lambda x: x @ x, x)

    count = count_flops(program, SQUARE)
    assert count.model is None and count.per_device is None
    assert count.contraction == PRODUCT
    (missing,) = count.uncounted
    assert missing.name == "while" and "depend on data" in missing.reason
    assert "test_model_flops.py" in missing.where
    # A loop whose bound is an argument too: its value is not part of the program.
    loop = count_flops(
        lambda x, n: lax.fori_loop(0, n, lambda _, x: x @ x, x), SQUARE, array(dtype=jnp.int32)
    )
    assert loop.model is None


def test_a_cond_counts_its_costliest_branch_and_says_so() -> None:
    def program(flag: Any, x: jax.Array) -> jax.Array:
        return lax.cond(flag, lambda x: x @ x @ x, lambda x: x @ x, x)

    count = count_flops(program, array(dtype=jnp.bool_), SQUARE)
    assert count.model == 2 * PRODUCT
    assert any(note.startswith("cond: the branch with most FLOPs") for note in count.notes)
    known = count_flops(program, False, SQUARE)
    assert known.model == PRODUCT and not known.notes
    switch = [lambda x: x, lambda x: x @ x, lambda x: x @ x @ x]
    assert count_flops(lambda x: lax.switch(jnp.int32(1), switch, x), SQUARE).model == PRODUCT
    assert count_flops(lambda i, x: lax.switch(i, switch, x), 9, SQUARE).model == 2 * PRODUCT


def test_gradient_accumulation_by_scan() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def accumulated(w: jax.Array, x: jax.Array) -> jax.Array:
        add = lambda total, rows: (total + jax.grad(loss)(w, rows), None)  # noqa: E731
        return lax.scan(add, jnp.zeros((4, 6)), x)[0]

    # Each of 5 microbatches: forward, and the gradient of the weights.
    assert count_flops(accumulated, array(4, 6), array(5, 3, 4)).model == 5 * 2 * (2 * 3 * 4 * 6)
    whole = count_flops(jax.grad(loss), array(4, 6), array(15, 4))
    assert whole.model == 5 * 2 * (2 * 3 * 4 * 6)


def test_a_convolution_with_groups_dilation_and_padding() -> None:
    count = count_flops(
        lambda x, k: lax.conv_general_dilated(
            x, k, window_strides=(1, 2), padding=((1, 1), (0, 0)), rhs_dilation=(1, 2),
            feature_group_count=2, dimension_numbers=("NCHW", "OIHW", "NCHW"),
        ),
        array(3, 4, 5, 9), array(6, 2, 3, 3),
    )  # fmt: skip
    # Rows: 5 outputs of 3 taps, of which the first and the last have one in the padding.
    # Columns: a window of 3 taps reaches over 5, stride 2: 3 outputs of 3 taps.
    rows, columns = 5 * 3 - 2, 3 * 3
    assert count.model == 2 * 3 * 6 * (4 // 2) * rows * columns
    assert set(count.by_operation) == {"conv_general_dilated"}


def test_a_transposed_convolution_leaves_the_holes_out() -> None:
    count = count_flops(
        lambda x, k: lax.conv_general_dilated(
            x, k, (1,), [(0, 0)], lhs_dilation=(2,), dimension_numbers=("NHC", "HIO", "NHC")
        ),
        array(2, 4, 3), array(3, 3, 5),
    )  # fmt: skip
    # x.x.x.x has 5 windows of three: x.x .x. x.x .x. x.x
    assert count.model == 2 * 2 * 5 * 3 * (2 + 1 + 2 + 1 + 2)


def _grouped_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    with jax.named_scope("attention"):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)


ATTENTION = array(2, 16, 8, 4), array(2, 16, 2, 4), array(2, 16, 2, 4)  # 8 heads on 2 of keys


def test_grouped_attention_counts_every_query_head_once() -> None:
    scores = 2 * 2 * 8 * 16 * 16 * 4  # batch, query heads, queries, keys, width; values the same
    assert count_flops(_grouped_attention, *ATTENTION).model == 2 * scores
    loss = lambda q, k, v: jnp.sum(_grouped_attention(q, k, v) ** 2)  # noqa: E731
    backward = jax.grad(loss, argnums=(0, 1, 2))
    assert count_flops(backward, *ATTENTION).model == 6 * scores


def test_causal_attention_is_halved_where_it_is_declared() -> None:
    scores = 2 * 2 * 8 * 16 * 16 * 4

    def block(w: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(_grouped_attention(q @ w, k, v) ** 2)

    half = partial(count_flops, scale={"attention": Fraction(1, 2)})
    w, product = array(4, 4), 2 * (2 * 16 * 8) * 4 * 4
    count = half(block, w, *ATTENTION)
    assert count.model == product + scores
    # The gradients stand in the same scope: w, and scores and values once for each operand.
    backward = jax.jit(jax.grad(jax.checkpoint(block), argnums=(0, 1, 2, 3)))
    assert half(backward, w, *ATTENTION).model == 3 * product + 3 * scores


def test_a_scope_inside_itself_counts_once_and_different_ones_multiply() -> None:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        with jax.named_scope("a"), jax.named_scope("b"):
            return x @ x

    def outer(x: jax.Array) -> jax.Array:
        with jax.named_scope("a"):
            return inner(x) @ x

    count = count_flops(outer, SQUARE, scale={"a": 0.5, "b": 0.25})
    assert count.model == PRODUCT // 2 + PRODUCT // 8


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(UsageError, match="scale: got 'atention': expected .*attention"):
        count_flops(_grouped_attention, *ATTENTION, scale={"atention": 0.5})
    with pytest.raises(UsageError, match="scale: got -1 for 'attention'"):
        count_flops(_grouped_attention, *ATTENTION, scale={"attention": -1})


def test_active_experts_of_a_dense_dispatch_are_declared() -> None:
    def moe(x: jax.Array, router: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        gate, chosen = lax.top_k(jax.nn.softmax(x @ router), 2)
        with jax.named_scope("experts"):
            hidden = jax.nn.silu(jnp.einsum("td,edf->etf", x, up))
            outputs = jnp.einsum("etf,efd->etd", hidden, down)
        weight = jnp.sum(jax.nn.one_hot(chosen, 8) * gate[..., None], axis=1)
        return jnp.einsum("etd,te->td", outputs, weight)

    shapes = array(10, 4), array(4, 8), array(8, 4, 6), array(8, 6, 4)
    router, one, mix = 2 * 10 * 4 * 8, 2 * (2 * 10 * 4 * 6), 2 * 10 * 8 * 4
    assert count_flops(moe, *shapes).model == router + 8 * one + mix
    active = count_flops(moe, *shapes, scale={"experts": Fraction(2, 8)})
    assert active.model == router + 2 * one + mix


def test_a_ragged_product_counts_each_row_once() -> None:
    rows, groups = array(16, 8), array(4, dtype=jnp.int32)
    w = array(4, 8, 6)
    assert count_flops(lax.ragged_dot, rows, w, groups).model == 2 * 16 * 8 * 6
    loss = lambda x, w, n: jnp.sum(lax.ragged_dot(x, w, n) ** 2)  # noqa: E731
    count = count_flops(jax.grad(loss, argnums=(0, 1)), rows, w, groups)
    assert count.model == 3 * (2 * 16 * 8 * 6)


def test_frozen_weights_cost_no_gradient() -> None:
    def loss(adapter: Any, w: jax.Array, x: jax.Array) -> jax.Array:
        a, b = adapter
        x = jnp.tanh(x @ w + x @ a @ b)
        return jnp.sum(jnp.tanh(x @ w + x @ a @ b))

    base, low = 2 * 5 * 32 * 32, 2 * 5 * 32 * 2
    shapes = (array(32, 2), array(2, 32)), array(32, 32), array(5, 32)
    # Forward: two layers. Backward: the second layer's input, through both paths; each adapter's
    # two weights; in each layer the gradient between them.
    expected = 2 * (base + 2 * low) + (base + low) + 2 * 2 * low + 2 * low
    assert count_flops(jax.grad(loss), *shapes).model == expected
    # A gradient that is computed and thrown away is no part of the program either.
    both = lambda *args: jax.grad(loss, argnums=(0, 1))(*args)[0]  # noqa: E731
    assert count_flops(both, *shapes).model == expected


def test_dead_code_costs_nothing() -> None:
    def program(x: jax.Array) -> jax.Array:
        _ = jnp.sin(x @ x)
        return x + 1

    count = count_flops(program, SQUARE)
    assert (count.model, count.transcendental, count.elementwise) == (0, 0, 16)


def _mesh(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def test_a_sharded_program_agrees_with_its_global_twin() -> None:
    mesh = _mesh(data=4, tensor=2)

    def local(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return lax.psum(jnp.tanh(x @ up) @ down, "tensor")

    shapes = array(8, 6), array(6, 10), array(10, 6)
    by_hand = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P(None, "tensor"), P("tensor")), out_specs=P("data")
    )
    flops = 2 * 8 * 6 * 10 + 2 * 8 * 10 * 6
    count = count_flops(by_hand, *shapes)
    assert (count.model, count.devices, count.per_device) == (flops, 8, flops / 8)

    def grad(fn: Any) -> Any:
        return jax.grad(lambda *args: jnp.sum(fn(*args) ** 2), argnums=(0, 1, 2))

    def whole(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.tanh(x @ up) @ down

    placed = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, P("data")))
        for s in shapes[:1]
    ]
    automatic = count_flops(grad(whole), *placed, *shapes[1:])
    assert automatic.model == count_flops(grad(by_hand), *shapes).model == 3 * flops
    assert automatic.per_device == 3 * flops / 8


def test_a_shard_map_over_some_axes_counts_those() -> None:
    mesh = _mesh(data=4, tensor=2)
    half = jax.shard_map(
        lambda x, w: lax.all_gather(x @ w, "data"), mesh=mesh, in_specs=(P("data"), P()),
        out_specs=P(), axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    count = count_flops(jax.jit(half), array(8, 6), array(6, 10))
    assert (count.model, count.devices) == (2 * 8 * 6 * 10, 8)


def test_a_shard_map_inside_another_multiplies_by_its_own_axes() -> None:
    mesh = _mesh(data=4, tensor=2)

    def outer(x: jax.Array, w: jax.Array) -> jax.Array:
        inner = jax.shard_map(
            jnp.matmul, in_specs=(P(), P(None, "tensor")), out_specs=P(None, "tensor"),
            axis_names={"tensor"},
        )  # fmt: skip
        return inner(x, w)

    count = count_flops(
        jax.shard_map(
            outer, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}
        ),
        array(8, 6), array(6, 10),
    )  # fmt: skip
    assert (count.model, count.devices) == (2 * 8 * 6 * 10, 8)


def test_nested_jit_counts_each_call() -> None:
    inner = jax.jit(lambda x: x @ x)
    outer = jax.jit(lambda x: inner(inner(x)) + inner(x))
    # The first inner(x) and the last are two calls: nothing is merged.
    assert count_flops(outer, SQUARE).model == 3 * PRODUCT


def test_a_custom_vjp_counts_what_it_says() -> None:
    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return x @ x

    f.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x @ x @ x,))
    assert count_flops(f, SQUARE).model == PRODUCT
    assert count_flops(jax.grad(lambda x: jnp.sum(f(x))), SQUARE).model == 4 * PRODUCT - PRODUCT


def test_complex_products_are_eight_flops_and_integers_are_apart() -> None:
    z = array(3, 5, dtype=jnp.complex64)
    assert count_flops(lambda a, b: a @ b.T, z, z).model == 8 * 3 * 3 * 5
    i = array(3, 5, dtype=jnp.int8)
    count = count_flops(
        lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=int),
        i, i,
    )  # fmt: skip
    assert (count.model, count.integer) == (0, 2 * 3 * 3 * 5)
    assert any("integers" in note for note in count.notes)


@pytest.mark.parametrize("jitted", [False, True])
def test_hardware_flops_are_those_of_the_program_that_is_compiled(jitted: bool) -> None:
    """Of eight rematerialised layers: 3 products each for the model, 4 for the machine."""

    def loss(x: Any) -> Any:
        layer = jax.checkpoint(lambda c: jnp.tanh(c @ c))
        return jax.lax.scan(lambda c, _: (layer(c), None), x, None, length=8)[0].sum()

    grad = jax.grad(loss)
    found = count_flops(
        jax.jit(grad) if jitted else grad, jax.ShapeDtypeStruct((16, 16), "float32")
    )
    product = 2 * 16**3
    assert (found.model, found.hardware) == (8 * 3 * product, 8 * 4 * product)
    assert found.hardware is found.hardware, "compiled once"
