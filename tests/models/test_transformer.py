"""The reference transformer against its definition, written once more in NumPy."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrel.config import MeshConfig, ModelConfig
from jaxrel.digest import leaf_paths
from jaxrel.models import transformer

TINY = ModelConfig(
    layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=48, vocabulary=61, dropout=0.0
)
NOISY = replace(TINY, dropout=0.25)
KEY = jax.random.key(7)
# The compiler's optimizations would be most of the time of these tests.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@cache
def _parameters() -> Any:
    axes = transformer.logical_axes(TINY)
    return jax.tree.map(
        lambda x, names: x + 0.1 * jnp.cos(jnp.arange(x.size).reshape(x.shape)) * _is_scale(names),
        jit(transformer.init_fn(TINY))(jax.random.key(0)),
        axes,
    )


def _is_scale(names: tuple[str, ...]) -> bool:
    return names in (("embed",), ("layers", "embed"))


def parameters() -> Any:
    """Parameters of TINY, and of it with other noise and dtypes; norm scales are not all one."""
    return jax.tree.map(lambda x: x, _parameters())


def batch(config: ModelConfig = TINY, rows: int = 2, length: int = 12) -> dict[str, jax.Array]:
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (rows, length + 1))
    return {"tokens": jnp.asarray(tokens, jnp.int32)}


@cache
def _step(config: ModelConfig) -> Any:
    return jit(jax.value_and_grad(transformer.loss_fn(config), has_aux=True))


@cache
def _logits(config: ModelConfig) -> Any:
    return jit(transformer.logits_fn(config))


def loss_and_grads(config: ModelConfig, params: Any, key: jax.Array = KEY) -> tuple[Any, Any]:
    (loss, _), grads = _step(config)(params, batch(), key)
    return loss, grads


def numpy_logits(config: ModelConfig, params: Any, tokens: np.ndarray) -> np.ndarray:
    """The forward pass in float64, a head and a position at a time."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        half = config.head_dim // 2
        pairs = x[:half] + 1j * x[half:]
        turned = pairs * np.exp(1j * position * config.rope_theta ** (-np.arange(half) / half))
        return np.concatenate([turned.real, turned.imag])

    def attend(x: np.ndarray, w: Any) -> np.ndarray:
        out = np.zeros_like(x)
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            q = [turn(row @ w["query"]["kernel"][:, head], t) for t, row in enumerate(x)]
            k = [turn(row @ w["key"]["kernel"][:, shared], t) for t, row in enumerate(x)]
            v = x @ w["value"]["kernel"][:, shared]
            for t in range(len(x)):
                scores = np.array([q[t] @ k[s] for s in range(t + 1)]) / np.sqrt(config.head_dim)
                weights = np.exp(scores - scores.max())
                out[t] += (weights / weights.sum()) @ v[: t + 1] @ w["out"]["kernel"][head]
        return out

    def feed_forward(x: np.ndarray, w: Any) -> np.ndarray:
        gate = x @ w["gate"]["kernel"]
        return (gate / (1 + np.exp(-gate)) * (x @ w["up"]["kernel"])) @ w["down"]["kernel"]

    rows = []
    for row in tokens:
        x = p["embed"]["embedding"][row]
        for layer in range(config.layers):
            w = jax.tree.map(lambda leaf, i=layer: leaf[i], p["layers"])
            x = x + attend(norm(x, w["attention_norm"]["scale"]), w["attention"])
            x = x + feed_forward(norm(x, w["mlp_norm"]["scale"]), w["mlp"])
        rows.append(norm(x, p["final_norm"]["scale"]) @ p["head"]["kernel"])
    return np.stack(rows)


@pytest.mark.core
def test_loss_is_that_of_the_definition() -> None:
    params, tokens = parameters(), np.asarray(batch()["tokens"])
    logits = numpy_logits(TINY, params, tokens[:, :-1])
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    rows, places = np.indices(tokens[:, 1:].shape)
    expected = -np.mean(np.log(chances[rows, places, tokens[:, 1:]]))
    (loss, metrics), _ = _step(TINY)(params, batch(), KEY)
    assert loss.dtype == jnp.float32 and loss.shape == () and metrics == {}
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    ours = _logits(TINY)(params, jnp.asarray(tokens[:, :-1]), KEY)
    np.testing.assert_allclose(ours, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.core
def test_scan_equals_layers_one_by_one() -> None:
    """Also with dropout: the noise of a layer is that of the key folded with its index."""
    params, tokens = parameters(), batch()["tokens"][:, :-1]
    rotary = transformer.rotary_angles(tokens.shape[1], NOISY.head_dim, NOISY.rope_theta)

    @jit
    def one_by_one(params: Any) -> jax.Array:
        ends = transformer.Ends(NOISY, nnx.Rngs(0))
        nnx.update(ends, {k: v for k, v in params.items() if k != "layers"})
        x = params["embed"]["embedding"][tokens]
        for layer in range(NOISY.layers):
            block = transformer.Block(NOISY, nnx.Rngs(0))
            nnx.update(block, jax.tree.map(lambda leaf, i=layer: leaf[i], params["layers"]))
            x = block(x, rotary, nnx.Rngs(dropout=jax.random.fold_in(KEY, layer)))
        return ends.head(ends.final_norm(x))

    scanned = _logits(NOISY)(params, tokens, KEY)
    np.testing.assert_allclose(scanned, one_by_one(params), rtol=1e-5, atol=1e-5)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    params, tokens = parameters(), batch()["tokens"]
    logits, tokens = _logits(TINY), tokens[:, :-1]
    before = logits(params, tokens, KEY)
    for t in (1, 5, 10):
        after = logits(params, tokens.at[:, t:].set((tokens[:, t:] + 1) % 61), KEY)
        np.testing.assert_array_equal(before[:, :t], after[:, :t])
        assert np.all(np.any(before[:, t:] != after[:, t:], axis=-1))


def test_grouped_heads_equal_repeated_heads() -> None:
    """Two query heads that share a key and value head: the same as each with a copy."""
    params = parameters()
    full = replace(TINY, kv_heads=TINY.heads)
    repeated = jax.tree.map(lambda x: x, params)
    for name in ("key", "value"):
        kernel = params["layers"]["attention"][name]["kernel"]
        repeated["layers"]["attention"][name] = {"kernel": jnp.repeat(kernel, 2, axis=2)}
    assert jax.tree.map(jnp.shape, repeated) == jax.tree.map(
        jnp.shape, jax.eval_shape(transformer.init_fn(full), KEY)
    )
    tokens = batch()["tokens"][:, :-1]
    np.testing.assert_allclose(
        _logits(TINY)(params, tokens, KEY),
        _logits(full)(repeated, tokens, KEY),
        rtol=1e-5,
        atol=1e-5,
    )


def test_rotary_scores_depend_on_distance_alone() -> None:
    q, k = jax.random.normal(jax.random.key(1), (2, 8))
    angles = transformer.rotary_angles(40, 8, 10000.0)
    at = lambda x: transformer.rotate(jnp.broadcast_to(x, (1, 40, 1, 8)), angles)[0, :, 0]  # noqa: E731
    scores = at(q) @ at(k).T
    for shift in (1, 7, 20):
        np.testing.assert_allclose(scores[shift:, shift:], scores[:-shift, :-shift], atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(at(q), axis=-1), jnp.linalg.norm(q), rtol=1e-5)
    assert np.std(scores[0]) > 0.1


def test_dropout_depends_on_key_and_rate() -> None:
    params = parameters()
    one, other = jax.random.key(1), jax.random.key(2)
    assert loss_and_grads(TINY, params, one)[0] == loss_and_grads(TINY, params, other)[0]
    assert loss_and_grads(NOISY, params, one)[0] == loss_and_grads(NOISY, params, one)[0]
    assert loss_and_grads(NOISY, params, one)[0] != loss_and_grads(NOISY, params, other)[0]


def test_dropout_keeps_the_mean_of_both_branches() -> None:
    """With the residual stream taken away, a branch is either zero or scaled up."""
    block = transformer.Block(NOISY, nnx.Rngs(0))
    rotary = transformer.rotary_angles(400, NOISY.head_dim, NOISY.rope_theta)
    block.attention = lambda x, rotary: jnp.ones_like(x)  # type: ignore[assignment]
    block.mlp = lambda x: 10 * jnp.ones_like(x)  # type: ignore[assignment]
    y = np.asarray(block(jnp.zeros((4, 400, 32)), rotary, nnx.Rngs(dropout=1)))
    values, counts = np.unique(np.round(y * 0.75), return_counts=True)
    assert values.tolist() == [0, 1, 10, 11]  # each branch has noise of its own
    shares = counts / y.size
    np.testing.assert_allclose(shares, [1 / 16, 3 / 16, 3 / 16, 9 / 16], atol=0.01)
    assert y.mean() == pytest.approx(11, rel=0.02)


def test_remat_changes_nothing_but_memory() -> None:
    params = parameters()
    loss, grads = loss_and_grads(replace(NOISY, remat="full"), params)
    for other in (replace(NOISY, remat="none"), replace(NOISY, remat="dots")):
        other_loss, other_grads = loss_and_grads(other, params)
        assert float(other_loss) == pytest.approx(float(loss), rel=1e-6)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), grads, other_grads
        )


@pytest.mark.core
def test_bfloat16_computes_close_to_float32() -> None:
    half = replace(TINY, compute_dtype="bfloat16")
    params = parameters()
    loss, grads = loss_and_grads(TINY, params)
    half_loss, half_grads = loss_and_grads(half, params)
    assert half_loss.dtype == jnp.float32 and half_loss != loss
    assert float(half_loss) == pytest.approx(float(loss), rel=3e-3)
    for path, a, b in zip(
        leaf_paths(grads), jax.tree.leaves(grads), jax.tree.leaves(half_grads), strict=True
    ):
        assert b.dtype == jnp.float32, path
        assert jnp.linalg.norm(a - b) < 0.05 * jnp.linalg.norm(a), path


def test_norm_scales_work_in_float32_under_bfloat16() -> None:
    """A change that bfloat16 cannot hold still changes the loss."""
    half = replace(TINY, compute_dtype="bfloat16")
    params, scale = parameters(), jnp.ones((TINY.layers, TINY.hidden))
    changed = scale + 2.0**-10 * (-1.0) ** jnp.arange(TINY.hidden)
    assert jnp.all(changed.astype(jnp.bfloat16) == 1)
    losses = []
    for params["layers"]["mlp_norm"]["scale"] in (scale, changed):
        losses.append(loss_and_grads(half, params)[0])
    assert losses[0] != losses[1]


def test_a_token_outside_the_vocabulary_is_not_silent() -> None:
    tokens = batch()["tokens"].at[0, 3].set(TINY.vocabulary)
    (loss, _), _ = _step(TINY)(parameters(), {"tokens": tokens}, KEY)
    assert jnp.isnan(loss)


@pytest.mark.core
def test_parameters_are_as_counted_and_named() -> None:
    c = ModelConfig()
    params = jax.eval_shape(transformer.init_fn(c), KEY)
    attention = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    per_layer = attention + 3 * c.hidden * c.mlp + 2 * c.hidden
    total = c.layers * per_layer + 2 * c.vocabulary * c.hidden + c.hidden
    assert sum(x.size for x in jax.tree.leaves(params)) == total
    assert list(params) == ["embed", "final_norm", "head", "layers"]
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))

    axes = transformer.logical_axes(c)
    names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    assert leaf_paths(jax.tree.map(lambda _: 0, params)) == leaf_paths(
        jax.tree.map(lambda _: 0, axes, is_leaf=lambda x: isinstance(x, tuple))
    )
    sizes = {"layers": 4, "embed": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
    sizes |= {"mlp": 192, "vocabulary": 256}
    for path, leaf, named in zip(leaf_paths(params), jax.tree.leaves(params), names, strict=True):
        assert leaf.shape == tuple(sizes[name] for name in named), path
        assert path.startswith("layers/") == (named[0] == "layers")
        free = [n for n in named if n not in MeshConfig().rules and n != "layers"]
        assert any(sizes[name] % 16 == 0 for name in free), path


def test_initial_loss_is_that_of_a_guess() -> None:
    """Logits of unit variance add half a nat to the even guess."""
    params = parameters()
    loss, _ = loss_and_grads(TINY, params)
    assert float(loss) == pytest.approx(np.log(TINY.vocabulary) + 0.5, abs=0.3)
    first, second, _ = params["layers"]["mlp"]["down"]["kernel"]
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1


def test_parameters_have_the_same_bits_on_every_mesh() -> None:
    config = replace(ModelConfig(), layers=2, hidden=48, mlp=75, vocabulary=251)
    init, names = transformer.init_fn(config), transformer.logical_axes(config)
    whole = jax.jit(init)(KEY)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    shardings = jax.tree.map(
        lambda axes: NamedSharding(mesh, P(*("fsdp" if n == "embed" else None for n in axes))),
        names,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    sharded = jax.jit(init, out_shardings=shardings)(KEY)
    jax.tree.map(np.testing.assert_array_equal, whole, sharded)
    assert not sharded["head"]["kernel"].is_fully_replicated


def test_tensor_axis_gives_the_same_noise_and_values() -> None:
    """Another noise would move the loss by 1e-2."""
    params = parameters()
    loss, grads = loss_and_grads(NOISY, params)
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    rules = {name: axis for name, axis in MeshConfig().rules.items() if name != "vocabulary"}
    sharded = jax.tree.map(
        lambda axes, x: jax.device_put(x, NamedSharding(mesh, P(*(rules.get(n) for n in axes)))),
        transformer.logical_axes(NOISY),
        params,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    assert not sharded["layers"]["attention"]["query"]["kernel"].is_fully_replicated
    tensor_loss, tensor_grads = loss_and_grads(NOISY, sharded)
    assert float(tensor_loss) == pytest.approx(float(loss), rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, tensor_grads
    )
