"""Hand counts of compiled programs."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrel.throughput.hardware_flops import HardwareFlops, count_hlo, hardware_flops

pytestmark = pytest.mark.core

X, W = jnp.ones((8, 64)), jnp.ones((8, 64, 64))
MATMUL = 2 * 8 * 64 * 64
"""FLOPs of one product [8, 64] x [64, 64]."""


def compiled(f: Callable[..., Any], *args: Any, **jit: Any) -> Any:
    return jax.jit(f, **jit).lower(*args).compile()


def count(f: Callable[..., Any], *args: Any, **jit: Any) -> HardwareFlops:
    return hardware_flops(compiled(f, *args, **jit))


def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ w), None


def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(layer, x, w)[0]


def test_a_scan_of_eight_layers() -> None:
    found = count(scanned, W, X)
    assert found.uncounted == found.notes == ()
    assert found.per_device.contraction == 8 * MATMUL
    assert found.per_device.transcendental == 8 * 8 * 64
    # A counter: one addition a round, one comparison a round and one that ends the loop.
    assert found.per_device.elementwise == 8 + 9
    assert found.per_device.collective == 0
    assert found.by_operation == {"dot": 8 * MATMUL, "tanh": 4096, "compare": 9, "add": 8}


def test_a_scan_and_its_unrolled_twin_have_the_same_contractions() -> None:
    def unrolled(w: jax.Array, x: jax.Array) -> jax.Array:
        for i in range(8):
            x = layer(x, w[i])[0]
        return x

    found = count(unrolled, W, X)
    assert found.per_device.contraction == 8 * MATMUL
    assert found.per_device.transcendental == 8 * 8 * 64
    assert found.reasons == {}


def test_loops_in_loops_multiply() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        def outer(_: int, h: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, 5, lambda _, g: g @ w, h) * 2

        return jax.lax.fori_loop(0, 3, outer, x)

    found = count(f, jnp.ones((4, 16)), jnp.ones((16, 16)))
    assert found.per_device.contraction == 3 * 5 * (2 * 4 * 16 * 16)
    assert found.by_operation["multiply"] == 3 * 4 * 16


def loss(body: Callable[..., Any], w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)


def test_a_gradient_is_two_more_products_for_each_and_remat_the_forward_again() -> None:
    plain = count(jax.grad(lambda w, x: loss(layer, w, x)), W, X)
    remat = count(jax.grad(lambda w, x: loss(jax.checkpoint(layer), w, x)), W, X)
    assert plain.per_device.contraction == 3 * 8 * MATMUL
    assert remat.per_device.contraction == 4 * 8 * MATMUL
    assert plain.per_device.transcendental == 8 * 8 * 64
    assert remat.per_device.transcendental == 2 * 8 * 8 * 64


def test_gradient_accumulation_counts_every_microbatch() -> None:
    def f(w: jax.Array, batches: jax.Array) -> jax.Array:
        def add(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), None

        return jax.lax.scan(add, jnp.zeros_like(w), batches)[0]

    found = count(f, jnp.ones((64, 64)), jnp.ones((4, 8, 64)))
    assert found.per_device.contraction == 4 * 2 * MATMUL


def test_a_conditional_counts_as_its_longest_branch_and_says_so() -> None:
    def f(p: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.switch(p, [lambda x: x + 1, lambda x: x @ x @ x, lambda x: x @ x], x)

    found = count(f, 1, jnp.ones((32, 32)))
    assert found.per_device.contraction == 2 * (2 * 32**3)
    assert len(found.notes) == 1
    assert re.fullmatch("conditional .*: counted as its longest branch, .*", found.notes[0])


def test_what_is_unknown_in_any_branch_is_unknown() -> None:
    def f(n: jax.Array, x: jax.Array) -> jax.Array:
        def repeat(x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, n, lambda _, x: x @ x, x)

        return jax.lax.cond(n > 3, repeat, lambda x: x @ x, x)

    found = count(f, 5, jnp.ones((32, 32)))
    assert found.per_device.contraction is None
    assert len(found.uncounted) == 1


@pytest.mark.parametrize(
    ("options", "image", "kernel", "products"),
    [
        # Along one dimension: outputs x taps, less those on padding.
        ({"padding": "VALID"}, 10, 3, 8 * 3),
        ({"padding": "SAME"}, 10, 3, 10 * 3 - 2),
        ({"padding": "SAME", "window_strides": (2,)}, 9, 3, 5 * 3 - 2),
        ({"padding": "VALID", "rhs_dilation": (2,)}, 10, 3, 6 * 3),
        # The image 3 spread to 1 0 1 0 1; of 3 windows of 3, the outer two meet 2 elements.
        ({"padding": ((0, 0),), "lhs_dilation": (2,)}, 3, 3, 2 + 1 + 2),
    ],
)
def test_convolutions_count_products_with_the_image_alone(
    options: dict[str, Any], image: int, kernel: int, products: int
) -> None:
    batch, features_in, features_out = 2, 4, 6

    def f(x: jax.Array, k: jax.Array) -> jax.Array:
        dims = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(
            x, k, **{"window_strides": (1,), **options}, dimension_numbers=dims
        )

    x = jnp.ones((batch, image, features_in))
    found = count(f, x, jnp.ones((kernel, features_in, features_out)))
    assert found.per_device.contraction == 2 * batch * products * features_in * features_out
    assert found.by_operation.keys() == {"convolution"}


def test_a_grouped_convolution_sees_its_own_features() -> None:
    def f(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "VALID", feature_group_count=4, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    found = count(f, jnp.ones((2, 8, 8, 8)), jnp.ones((3, 3, 2, 16)))
    assert found.per_device.contraction == 2 * (2 * 6 * 6 * 16) * (3 * 3 * 2)


def test_sort_scatter_gather_and_reduce() -> None:
    n, index = 128, jnp.array([1, 2, 3])
    assert count(jnp.sort, jnp.ones(n)).by_operation["sort"] == n * 7
    assert count(lambda x: x.at[index].add(1.0), jnp.ones(n)).by_operation["scatter"] == 3
    assert "gather" not in count(lambda x: x[index], jnp.ones(n)).by_operation
    assert count(jnp.sum, jnp.ones((4, n))).per_device.elementwise == 4 * n - 1
    assert count(lambda x: jnp.max(x, 1), jnp.ones((4, n))).per_device.elementwise == 4 * (n - 1)


def test_a_loop_of_unknown_length_is_named_and_never_guessed() -> None:
    def f(n: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, n, lambda _, x: x @ x, x)

    found = count(f, 5, jnp.ones((32, 32)))
    assert len(found.uncounted) == 1
    assert re.fullmatch(r"while .*: trip count unknown", found.uncounted[0])
    assert found.per_device.contraction is found.per_device.elementwise is None
    assert found.all_devices.contraction is None
    # Neither is in its body, so both are known.
    assert found.per_device.transcendental == found.per_device.collective == 0


def test_contractions_are_known_beside_a_loop_that_has_none() -> None:
    def f(n: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, n, lambda _, y: y + x, x @ x)

    found = count(f, 5, jnp.ones((32, 32)))
    assert found.per_device.contraction == 2 * 32**3
    assert found.per_device.elementwise is None


@pytest.mark.parametrize("f", [scanned, jax.grad(lambda w, x: loss(jax.checkpoint(layer), w, x))])
def test_a_trip_count_that_is_not_stated_is_read_from_the_loop(f: Callable[..., Any]) -> None:
    text = compiled(f, W, X).as_text()
    assert '"known_trip_count":{"n":"8"}' in text
    silent = count_hlo(text.replace("known_trip_count", "other"))
    assert silent.uncounted == ()
    assert silent.per_device == count_hlo(text).per_device


def test_callbacks_of_the_host_cost_nothing_and_hide_nothing() -> None:
    def f(x: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.asarray, out, x) @ x

    found = count(f, jnp.ones((16, 16)))
    assert found.per_device.contraction == 2 * 16**3
    assert found.uncounted == ()


def test_an_unknown_library_call_makes_the_figures_unknown() -> None:
    found = count(jnp.linalg.cholesky, jnp.eye(8))
    assert found.per_device.contraction is None
    assert len(found.uncounted) == 1
    assert re.fullmatch(r"custom call lapack_spotrf_ffi \(.*\): no estimate", found.uncounted[0])


def mesh(*degrees: int) -> jax.sharding.Mesh:
    axes = ("data", "tensor")[: len(degrees)]
    return jax.make_mesh(degrees, axes, axis_types=(AxisType.Auto,) * len(degrees))


def test_a_sharded_product_per_device_and_in_all() -> None:
    """[64, 32] x [32, 16] on 8 devices, rows divided by 4 and the sum by 2."""
    m = mesh(4, 2)
    place = [NamedSharding(m, P("data", "tensor")), NamedSharding(m, P("tensor", None))]
    found = count(
        jnp.matmul,
        jnp.ones((64, 32)),
        jnp.ones((32, 16)),
        in_shardings=place,
        out_shardings=NamedSharding(m, P("data")),
    )
    assert found.devices == 8
    assert found.per_device.contraction == 2 * 16 * 16 * 16
    assert found.all_devices.contraction == 2 * 64 * 32 * 16
    # Two devices add their [16, 16] once, half of it each.
    assert found.per_device.collective == 16 * 16 / 2
    assert found.all_devices.collective == 64 * 16


def test_collectives_of_shard_map() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        return (
            jax.lax.psum(jnp.sum(x), "data"),
            jax.lax.all_gather(x, "data"),
            jax.lax.psum_scatter(x.T @ x, "data", tiled=True),
        )

    specs = (P(), P("data"), P("data"))
    mapped = jax.shard_map(f, mesh=mesh(8), in_specs=P("data"), out_specs=specs)
    found = count(mapped, jnp.ones((64, 32)))
    assert found.devices == 8
    # A shard is [8, 32]; all 8 scalars make 7 additions, all 8 [32, 32] make 7 a place.
    assert found.by_operation["all-reduce"] * 8 == 7
    assert found.by_operation["reduce-scatter"] * 8 == 7 * 32 * 32
    assert "all-gather" not in found.by_operation
    assert found.per_device.contraction == 2 * 32 * 32 * 8
    assert found.all_devices.collective == 7 + 7 * 32 * 32


def test_a_reduction_over_one_axis_counts_the_devices_of_that_axis() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.psum(x, "tensor"), jax.lax.psum(x, "data")

    specs = (P("data"), P("tensor"))
    both = P(("data", "tensor"))
    mapped = jax.shard_map(f, mesh=mesh(2, 4), in_specs=both, out_specs=specs)
    found = count(mapped, jnp.ones((64, 4)))
    assert found.per_device.collective == 32 * 3 / 4 + 32 * 1 / 2


def test_operations_add_up_to_the_figures() -> None:
    found = count(jax.grad(lambda w, x: loss(jax.checkpoint(layer), w, x)), W, X)
    figures = found.per_device
    parts = (figures.contraction, figures.elementwise, figures.transcendental, figures.collective)
    assert sum(found.by_operation.values()) == sum(p for p in parts if p is not None)
