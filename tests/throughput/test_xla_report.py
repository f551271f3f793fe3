"""XLA's number beside ours: equal where it can be, and a reason where it is not."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxrel.throughput.hardware_flops import hardware_flops
from jaxrel.throughput.xla_report import xla_report

pytestmark = pytest.mark.core

F32, BF16 = jnp.float32, jnp.bfloat16


def ones(*shape: int, dtype: Any = F32) -> jax.Array:
    return jnp.ones(shape, dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def mlp_loss(ws: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((jax.nn.gelu(x @ ws[0]) @ ws[1] - x) ** 2)


def layer_norm(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1)
    return -picked.mean()


def convolve(x: jax.Array, k: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def adam(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def pool(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


LOOP_FREE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "product": (jnp.matmul, (ones(64, 128), ones(128, 32))),
    "batched product": (jnp.matmul, (ones(4, 16, 32), ones(4, 32, 8))),
    "bfloat16 product": (jnp.matmul, (ones(64, 64, dtype=BF16), ones(64, 64, dtype=BF16))),
    "attention": (attention, (ones(2, 16, 4, 8),) * 3),
    "gradient of attention": (
        jax.grad(lambda *a: attention(*a).sum(), (0, 1, 2)),
        (ones(2, 16, 4, 8),) * 3,
    ),
    "gradient of an MLP": (jax.grad(mlp_loss), ((ones(32, 64), ones(64, 32)), ones(16, 32))),
    "layer norm": (layer_norm, (ones(16, 64),)),
    "cross entropy": (jax.value_and_grad(cross_entropy), (ones(16, 64), jnp.arange(16))),
    "convolution": (convolve, (ones(2, 15, 15, 4), ones(3, 3, 4, 8))),
    "gradient of a convolution": (
        jax.grad(lambda x, k: (convolve(x, k) ** 2).sum(), (0, 1)),
        (ones(2, 15, 15, 4), ones(3, 3, 4, 8)),
    ),
    "pooling and its gradient": (
        jax.value_and_grad(lambda x: (pool(x) ** 2).sum()),
        (ones(2, 9, 9, 3),),
    ),
    "Adam": (adam, (ones(128, 8),) * 4),
    "sort": (jnp.argsort, (ones(300),)),
    "running sum": (lambda x: jnp.cumsum(x, 1), (ones(4, 100),)),
    "scatter and gather": (lambda x, i: x.at[i].add(x[i] * 2), (ones(50, 4), jnp.arange(7))),
    "branches": (
        lambda p, x: jax.lax.cond(p > 0, lambda x: x @ x, lambda x: x + 1, x),
        (1, ones(32, 32)),
    ),
    "Fourier transform": (lambda x: jnp.abs(jnp.fft.fft(x)), (ones(8, 64),)),
}


def compiled(f: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(f).lower(*args).compile()


@pytest.mark.parametrize("name", LOOP_FREE)
def test_without_loops_and_library_calls_the_two_agree(name: str) -> None:
    program = compiled(LOOP_FREE[name][0], *LOOP_FREE[name][1])
    hardware, report = hardware_flops(program), xla_report(program)
    assert hardware.uncounted == ()
    assert report.flops is not None and report.flops > 0 and report.reason is None
    assert report.counted == pytest.approx(report.flops, rel=0.01)
    assert report.difference == ()
    theirs = program.cost_analysis().get("transcendentals", 0)
    assert hardware.per_device.transcendental == pytest.approx(theirs, rel=0.01)


def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


def test_a_loop_is_the_reason_and_the_amount() -> None:
    report = xla_report(compiled(scanned, ones(8, 64, 64), ones(8, 64)))
    # Seven rounds more of a product and two steps of the counter, and one comparison at the end.
    more = 7 * (2 * 8 * 64 * 64 + 2) + 1
    assert report.flops is not None
    assert report.counted == report.flops + more
    (line,) = report.difference
    assert line.startswith("while ")
    assert line.endswith(f": counted once by XLA, 8 times here: +{more:,}")


def test_a_loop_of_unknown_length_and_a_library_call_are_reasons() -> None:
    def f(n: jax.Array, x: jax.Array) -> jax.Array:
        x = jax.lax.fori_loop(0, n, lambda _, x: x @ x, x)
        return jax.lax.top_k(x, 4)[0]

    report = xla_report(compiled(f, 5, ones(32, 32)))
    assert report.counted is None
    words = "\n".join(report.difference)
    assert "counted once by XLA, not here" in words
    assert "custom call TopK: unknown to XLA, which adds -1" in words


def test_nothing_but_a_library_call_is_unknown_to_xla_and_counted_here() -> None:
    report = xla_report(compiled(lambda x: jax.lax.top_k(x, 4), ones(8, 64)))
    assert report.flops is None
    assert report.reason is not None and "flops = -1.0: XLA's mark for unknown" in report.reason
    assert report.counted == 8 * 64 * 2


def random_numbers(seed: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (64,))


def nested(x: jax.Array) -> jax.Array:
    def row(r: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, r: r * jnp.sum(r), r)

    return jax.lax.map(row, x)


def branches(p: jax.Array, x: jax.Array) -> jax.Array:
    """XLA, which counts the loop once, takes the other branch for the longer."""

    def repeat(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 8, lambda _, x: x @ x, x)

    return jax.lax.cond(p > 0, repeat, lambda x: x @ x @ x, x)


def sharded(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def f(x: jax.Array) -> jax.Array:
        scattered = jax.lax.psum_scatter(x.T @ x, "data", tiled=True)
        return jax.lax.psum(jnp.sum(scattered), "data")

    return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P())(x)


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (scanned, (ones(8, 64, 64), ones(8, 64))),
        (jax.grad(lambda w, x: scanned(w, x).sum()), (ones(8, 64, 64), ones(8, 64))),
        (random_numbers, (0,)),
        (nested, (ones(8, 64),)),
        (branches, (1, ones(16, 16))),
        (sharded, (ones(64, 32),)),
        (lambda x: jax.lax.top_k(x @ x, 4), (ones(8, 8),)),
    ],
)
def test_by_xla_rules_we_count_what_xla_counts_and_reasons_explain_the_rest(
    f: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    program = compiled(f, *args)
    hardware, report = hardware_flops(program), xla_report(program)
    assert report.flops == pytest.approx(hardware.by_xla_rules, rel=1e-6)
    assert report.counted is not None
    explained = sum(hardware.reasons.values())
    assert report.counted - hardware.by_xla_rules == pytest.approx(explained)
    assert explained != 0
    assert not any(line.startswith("no reason known") for line in report.difference)


class Stub:
    """A compiled program with a `cost_analysis` of our choice."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def as_text(self) -> str:
        return compiled(jnp.matmul, ones(4, 4), ones(4, 4)).as_text()

    def cost_analysis(self) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"flops": -1.0}, "flops = -1.0"),
        ({"flops": math.nan}, "flops = nan"),
        ({"flops": math.inf}, "flops = inf"),
        ({"flops": None}, "flops = None"),
        ({"flops": "many"}, "flops = 'many'"),
        ({}, "no entry flops"),
        ({"bytes accessed": 3.0}, "no entry flops"),
        (None, "returned None"),
        ([], r"returned \[\]"),
        ([None], "returned None"),
        ([{"flops": 2.0}, {"flops": -1.0}], "flops = -1.0"),
        (511, "returned 511"),
        (-1.0, "returned -1.0"),
        ("511", "returned '511'"),
        (NotImplementedError("no cost here"), "NotImplementedError: no cost here"),
    ],
)
def test_no_number_of_xla_is_a_reason_in_words_and_ours_stands(found: Any, reason: str) -> None:
    report = xla_report(Stub(found))
    assert report.flops is None
    assert report.reason is not None
    assert pytest.approx(2 * 4**3) == report.counted
    assert report.difference == ()
    assert re.search(reason, report.reason)


@pytest.mark.parametrize(
    "found",
    [
        {"flops": 128.0},
        {"flops": np.float32(128)},
        [{"flops": 128.0}],
        ({"flops": 100.0}, {"flops": 28}),
    ],
)
def test_a_number_of_xla_is_taken_from_a_mapping_or_a_list_of_them(found: Any) -> None:
    report = xla_report(Stub(found))
    assert (report.flops, report.reason, report.difference) == (128, None, ())


def test_a_difference_without_a_known_reason_is_said() -> None:
    assert xla_report(Stub({"flops": 100.0})).difference == ("no reason known: +28",)
