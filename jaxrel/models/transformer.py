"""The reference model: a decoder-only transformer in Flax NNX.

Pre-norm blocks of grouped-query attention with rotary positions and a gated (SwiGLU)
feed-forward layer, stacked on a leading axis and scanned. Inside a jaxrel step each block
is gathered where it is used, and once more in the backward pass.

Parameters are a plain nested dict of float32 arrays. The NNX modules are split once, when
a function is built, and merged with one layer's parameters in the body of the scan.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from jaxrel.config import ModelConfig
from jaxrel.gather import gather, gathers, remat_policy

Params = dict[str, Any]


def init_fn(config: ModelConfig) -> Callable[[jax.Array], Params]:
    """A function from a typed random key to the parameters.

    They are float32 under the keys embed, layers, final_norm and head; every leaf of
    `layers` has a leading axis of `config.layers`. The function works under `jit`, also
    with sharded outputs (the same bits on any mesh), and under `jax.eval_shape`.
    """

    def init(rng: jax.Array) -> Params:
        ends_key, blocks_key = jax.random.split(rng)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        ends = _params(Ends(config, nnx.Rngs(ends_key)))
        return ends | {"layers": _params(blocks(nnx.Rngs(blocks_key)))}

    return init


def logical_axes(config: ModelConfig) -> Params:
    """A name for every axis of every parameter: the structure of the parameters with a
    tuple of names in the place of each array."""

    def names(module: nnx.Module, *stacked: str) -> Params:
        flat = nnx.to_flat_state(nnx.state(module))
        return nnx.traversals.unflatten_mapping(
            {path: (*stacked, *leaf.get_metadata("logical_axes")) for path, leaf in flat}
        )

    ends, block = _abstract(config)
    return names(ends) | {"layers": names(block, "layers")}


def loss_fn(
    config: ModelConfig,
) -> Callable[[Params, dict[str, jax.Array], jax.Array], tuple[jax.Array, dict[str, jax.Array]]]:
    """A function from (parameters, batch, typed random key) to (loss, metrics).

    `batch["tokens"]` is int32 [b, S + 1]; the loss is the mean cross-entropy in nats of
    the S next tokens, float32 []; there are no metrics. Dropout noise depends on the key
    and the layer alone; to evaluate, build the function with `dropout=0`.
    """
    logits = logits_fn(config)

    @gathers("layers")
    def loss(
        params: Params, batch: dict[str, jax.Array], rng: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        tokens = batch["tokens"]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits(params, tokens[:, :-1], rng), tokens[:, 1:]
        )
        return jnp.mean(losses), {}

    return loss


def logits_fn(config: ModelConfig) -> Callable[[Params, jax.Array, jax.Array], jax.Array]:
    """A function from (parameters, tokens int32 [b, S], typed random key) to logits,
    float32 [b, S, vocabulary]. A token outside the vocabulary gives NaN."""
    dtype = jnp.dtype(config.compute_dtype)
    ends_def, block_def = (nnx.graphdef(module) for module in _abstract(config))

    @gathers("layers")
    def logits(params: Params, tokens: jax.Array, rng: jax.Array) -> jax.Array:
        ends = nnx.merge(ends_def, {k: v for k, v in params.items() if k != "layers"})
        rotary = rotary_angles(tokens.shape[1], config.head_dim, config.rope_theta)

        def block(x: jax.Array, layer: tuple[Params, jax.Array]) -> tuple[jax.Array, None]:
            weights, index = layer
            # Norm scales stay float32: bfloat16 would round away a step of the optimizer.
            weights = {
                name: gather(w, dtype=None if name.endswith("norm") else dtype)
                for name, w in weights.items()
            }
            rngs = nnx.Rngs(dropout=jax.random.fold_in(rng, index))
            return nnx.merge(block_def, weights)(x, rotary, rngs), None

        # A scan already keeps the compiler from sharing work between the two passes.
        block = jax.checkpoint(block, policy=remat_policy(config.remat), prevent_cse=False)
        x = ends.embed(tokens).astype(dtype)
        x, _ = lax.scan(block, x, (params["layers"], jnp.arange(config.layers)))
        return ends.head(ends.final_norm(x))

    return logits


class Ends(nnx.Module):
    """What comes before and after the blocks."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(
            config.vocabulary,
            config.hidden,
            embedding_init=nnx.initializers.normal(1.0),
            embedding_metadata={"logical_axes": ("vocabulary", "embed")},
            rngs=rngs,
        )
        self.final_norm = _norm(config, rngs)
        self.head = _linear(
            config, (config.hidden,), (config.vocabulary,), ("embed", "vocabulary"), rngs
        )
        self.head.preferred_element_type = jnp.float32


class Block(nnx.Module):
    """One layer: attention and feed-forward, each with its norm and residual branch."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = FeedForward(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: jax.Array, rotary: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        """x [b, S, hidden] -> the same, in the dtype of x."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary), rngs=rngs)
        return x + self.dropout(self.mlp(self.mlp_norm(x)), rngs=rngs)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions; softmax in float32."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        hidden, width = config.hidden, config.head_dim
        heads, kv_heads = (config.heads, width), (config.kv_heads, width)
        self.query = _linear(config, (hidden,), heads, ("embed", "heads", "head_dim"), rngs)
        self.key = _linear(config, (hidden,), kv_heads, ("embed", "kv_heads", "head_dim"), rngs)
        self.value = _linear(config, (hidden,), kv_heads, ("embed", "kv_heads", "head_dim"), rngs)
        self.out = _linear(config, heads, (hidden,), ("heads", "head_dim", "embed"), rngs)

    def __call__(self, x: jax.Array, rotary: jax.Array) -> jax.Array:
        """x [b, S, hidden] -> [b, S, hidden]."""
        query, key = rotate(self.query(x), rotary), rotate(self.key(x), rotary)
        # The implementation is pinned: a kernel picked by the library could change the bits.
        mixed = jax.nn.dot_product_attention(
            query, key, self.value(x), is_causal=True, implementation="xla"
        )
        return self.out(mixed)


class FeedForward(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        hidden, mlp = (config.hidden,), (config.mlp,)
        self.gate = _linear(config, hidden, mlp, ("embed", "mlp"), rngs)
        self.up = _linear(config, hidden, mlp, ("embed", "mlp"), rngs)
        self.down = _linear(config, mlp, hidden, ("mlp", "embed"), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [b, S, hidden] -> [b, S, hidden]."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def rotary_angles(length: int, head_dim: int, theta: float) -> jax.Array:
    """The angle by which each pair of features turns at each position: float32
    [length, head_dim / 2]."""
    frequency = theta ** (-jnp.arange(head_dim // 2, dtype=jnp.float32) * 2 / head_dim)
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequency


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Turn each pair (i, i + head_dim / 2) of x [b, S, heads, head_dim] by its angle, in
    float32; the result has the dtype of x."""
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _linear(
    config: ModelConfig,
    into: tuple[int, ...],
    out: tuple[int, ...],
    axes: tuple[str, ...],
    rngs: nnx.Rngs,
) -> nnx.LinearGeneral:
    # Both branches of every layer add to the residual stream: what they add starts small
    # enough for the sum over the depth to have unit variance.
    to_residual = axes[-1] == "embed"
    scale = 1 / (2 * config.layers) if to_residual else 1.0
    return nnx.LinearGeneral(
        into,
        out,
        axis=tuple(range(-len(into), 0)),
        use_bias=False,
        dtype=jnp.dtype(config.compute_dtype),
        kernel_init=nnx.initializers.variance_scaling(scale, "fan_in", "truncated_normal"),
        kernel_metadata={"logical_axes": axes},
        rngs=rngs,
    )


def _norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(
        config.hidden,
        dtype=jnp.float32,
        scale_metadata={"logical_axes": ("embed",)},
        rngs=rngs,
    )


def _params(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _abstract(config: ModelConfig) -> tuple[Ends, Block]:
    return nnx.eval_shape(lambda: (Ends(config, nnx.Rngs(0)), Block(config, nnx.Rngs(0))))
