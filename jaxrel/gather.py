"""The hook by which a model lets FSDP gather its parameters a layer at a time.

A model that scans over stacked layers names that part of its parameters and gathers each
layer's slice where it uses it:

    @gathers("layers")
    def loss_fn(params, batch, rng):
        def block(x, w):
            w = gather(w, dtype=jnp.bfloat16)  # this layer, whole
            ...
        x, _ = lax.scan(jax.checkpoint(block, policy=remat_policy("full")), x, params["layers"])

Inside a jaxrel step the leaves of `params["layers"]` are `Shard`s and `gather` runs the
collective; anywhere else they are arrays and `gather` only casts. A model without the
hook still trains: its parameters are gathered once, before it runs.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])


@partial(jax.tree_util.register_dataclass, data_fields=["value", "probe"], meta_fields=["collect"])
@dataclasses.dataclass(frozen=True)
class Shard:
    """This device's part of a parameter, inside a step.

    `value` is what is gathered and what receives the gradient: the shard over fsdp, and the
    same or the shard over fsdp and data. `probe` [layers] or [] has as its cotangent the
    squared norm of the gradient that the gathered parameter receives, before any reduction.
    `collect(value, probe, dtype)` returns the whole parameter.
    """

    value: Any
    probe: jax.Array
    collect: Callable[[Any, jax.Array, Any], jax.Array]


def gather(tree: Any, dtype: Any = None) -> Any:
    """The whole parameters of `tree`, cast to `dtype` (None leaves them as they are).

    Call it once on each layer's slice: a second call on the same slice would count its
    gradient twice in the per-group gradient norm.
    """

    def whole(leaf: Any) -> jax.Array:
        if isinstance(leaf, Shard):
            return leaf.collect(leaf.value, leaf.probe, dtype)
        return leaf if dtype is None else leaf.astype(dtype)

    return jax.tree.map(whole, tree, is_leaf=lambda leaf: isinstance(leaf, Shard))


def gathers(*names: str, stacked: bool = True) -> Callable[[F], F]:
    """Mark a loss function that gathers the top-level parameters `names` itself.

    `stacked` says that every leaf below them has a leading axis of layers that the model
    scans over (that axis is never sharded); False is for leaves used whole.
    """

    def mark(loss_fn: F) -> F:
        loss_fn.gathers = dict.fromkeys(names, stacked)  # type: ignore[attr-defined]
        return loss_fn

    return mark


def gathered_by(loss_fn: Callable[..., Any]) -> dict[str, bool]:
    """The names that `loss_fn` gathers itself, and whether their leaves are stacked."""
    return dict(getattr(loss_fn, "gathers", {}))


def remat_policy(name: str) -> Callable[..., Any]:
    """A `jax.checkpoint` policy that never keeps a gathered layer.

    `none` keeps everything else, `dots` keeps matrix products without batch dimensions,
    `full` keeps nothing. Keeping a gathered parameter would hold every layer at once,
    which is what FSDP is there to avoid: the backward pass gathers it again.
    """
    if name == "full":
        return jax.checkpoint_policies.nothing_saveable
    if name == "dots":
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    if name == "none":
        return _all_but_gathers
    raise ValueError(f"remat policy {name!r}: expected none, dots or full")


# Operations that only recast or rearrange: as cheap to repeat as to read back, and the
# result of one on a gathered parameter is that parameter still.
_REARRANGING = frozenset(
    "broadcast_in_dim convert_element_type reshape slice split squeeze transpose".split()
)


def _all_but_gathers(prim: Any, *_: Any, **__: Any) -> bool:
    return prim.name not in _REARRANGING and not prim.name.startswith(("all_gather", "custom_vjp"))
