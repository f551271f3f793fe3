"""Loss and gradient of every group, reduced to this device's shard of their mean.

Runs inside `shard_map` over data and fsdp; other axes of the mesh are left to the
compiler. Device (d, f) takes groups d*(k*F) + j*F + f for j = 0..k-1, so that fsdp is the
bottom of the summation tree, a device's own groups the middle and data the top.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxrel.gather import Shard
from jaxrel.mesh.layout import BATCH_SPEC, Layout, LeafLayout
from jaxrel.train.reduction import Reduction, fold, opaque_zero, sum_over_groups


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["loss", "grad_norm", "group_loss", "group_grad_norm", "metrics"],
    meta_fields=[],
)
@dataclass(frozen=True)
class BackwardReport:
    """Losses and norms of a step; fields as in `StepRecord`."""

    loss: jax.Array
    grad_norm: jax.Array
    group_loss: jax.Array
    group_grad_norm: jax.Array
    metrics: Any


def make_backward(
    loss_fn: Callable[..., Any],
    hooked: Mapping[str, bool],
    layout: Layout,
    leaves: Any,
    how: Reduction,
) -> Callable[..., tuple[Any, BackwardReport]]:
    """(params, batch, step, rng) -> (mean gradient in the parameters' shardings, report)."""
    over_data = jax.tree.map(lambda leaf: partial(_all_gather, "data", layout.data, leaf), leaves)
    specs = jax.tree.map(lambda leaf: leaf.manual, leaves)
    loops = how.loops(layout.local_groups)
    over = ("fsdp",) if loops else ("fsdp", "data")
    collectors = jax.tree.map(lambda leaf: _collector(layout, leaf, how, over), leaves)

    def backward(params: Any, batch: Any, step: Any, key_data: Any, impl: str) -> Any:
        rng = jax.random.fold_in(jax.random.wrap_key_data(key_data, impl=impl), step)
        zero = opaque_zero(step)
        # Gradients are of float32 copies, and so are summed in float32 whatever the parameters.
        whole = jax.tree.map(lambda f, x: f(x).astype(jnp.float32), over_data, params)
        # With one group a device, the sum over data follows at once, layer by layer.
        params = whole if loops else jax.tree.map(lambda x: x.astype(jnp.float32), params)
        probes = _probes(params, hooked, zero)

        def one_group(x: Any) -> tuple[Any, Any]:
            rows, j = x
            key = jax.random.fold_in(rng, _group_id(layout, j))

            def loss_of(params: Any, probes: Any) -> tuple[jax.Array, Any]:
                return loss_fn(_prepare(whole, params, probes, collectors, hooked), rows, key)

            (loss, metrics), (grads, squares) = jax.value_and_grad(
                loss_of, argnums=(0, 1), has_aux=True
            )(params, probes)
            square = sum(jnp.sum(s) for s in jax.tree.leaves(squares))
            return how.fence(grads, zero), (loss, square, metrics)

        rows, own = _local(batch, layout), jnp.arange(layout.local_groups, dtype=jnp.int32)
        xs = jax.tree.map(lambda x: x.reshape(*loops, *x.shape[1:]), (rows, own))
        if not loops:
            xs = jax.tree.map(lambda x: x[0], (rows, own))
        start = jax.tree.map(lambda x: jnp.full(x.shape, -0.0, jnp.float32), params)
        grads, aux = sum_over_groups(one_group, xs, loops, start)
        if loops:
            grads = jax.tree.map(partial(_reduce, "data", layout.data, how), leaves, grads)
        grads = jax.tree.map(lambda g: g / layout.groups, grads)
        grads = how.fence(grads, zero)
        return grads, _report(layout, leaves, grads, aux, how, zero)

    def run(params: Any, batch: Any, step: Any, rng: jax.Array) -> Any:
        impl = str(jax.random.key_impl(rng))
        return jax.shard_map(
            partial(backward, impl=impl),
            mesh=layout.mesh,
            in_specs=(specs, BATCH_SPEC, P(), P()),
            out_specs=(specs, P()),
            axis_names=layout.manual_axes,
            check_vma=False,
        )(params, batch, step, jax.random.key_data(rng))

    return run


def _group_id(layout: Layout, j: jax.Array) -> jax.Array:
    d, f = lax.axis_index("data"), lax.axis_index("fsdp")
    return d * (layout.local_groups * layout.fsdp) + j * layout.fsdp + f


def _local(batch: Any, layout: Layout) -> Any:
    """This device's groups, [local groups, rows, ...], of [1, local groups, 1, rows, ...]."""
    return jax.tree.map(lambda x: x.reshape(layout.local_groups, *x.shape[3:]), batch)


def _all_gather(name: str, size: int, leaf: LeafLayout, x: jax.Array) -> jax.Array:
    if leaf.axis is None or size == 1:
        return x
    axis = leaf.axis + x.ndim
    parts = jnp.moveaxis(lax.all_gather(x, name), 0, axis)
    return parts.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def all_gather_leaf(
    layout: Layout, leaf: LeafLayout, value: jax.Array, probe: Any, dtype: Any
) -> jax.Array:
    """The whole of a parameter's shard, where nothing is differentiated: a `Shard.collect`."""
    part = value.astype(dtype or leaf.dtype)
    return _all_gather("fsdp", layout.fsdp, leaf, _all_gather("data", layout.data, leaf, part))


def _reduce(name: str, size: int, how: Reduction, leaf: LeafLayout, g: jax.Array) -> jax.Array:
    if leaf.axis is None:
        return how.everywhere(g, name, size)
    return how.scatter(g, name, size, leaf.axis)


def _collector(
    layout: Layout, leaf: LeafLayout, how: Reduction, over: tuple[str, ...]
) -> Callable[..., Any]:
    """The gather over fsdp whose backward pass is the reduction over the axes `over`.

    It takes (what is gathered, what receives the gradient); its probe is the tap.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(2,))
    def collect(values: Any, probe: jax.Array, dtype: Any) -> jax.Array:
        return _all_gather("fsdp", layout.fsdp, leaf, values[0].astype(dtype or leaf.dtype))

    def forward(values: Any, probe: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        return collect(values, probe, dtype), probe

    def backward(dtype: Any, probe: jax.Array, g: jax.Array) -> tuple[Any, jax.Array]:
        zero = lax.bitcast_convert_type(probe, jnp.uint32)
        g = how.fence(g.astype(jnp.float32), zero)
        square = jnp.sum(jnp.square(g))
        for name in over:
            g = _reduce(name, layout.mesh.shape[name], how, leaf, g)
        return (None, g), square

    collect.defvjp(forward, backward)
    return collect


def _probes(params: Any, hooked: Mapping[str, bool], zero: jax.Array) -> dict[str, jax.Array]:
    """One tap for what is gathered at the top, and one for each part that the model gathers.

    A probe is 0.0, and its bits are the opaque zero that the backward pass needs.
    """
    probe = lax.bitcast_convert_type(zero, jnp.float32)
    probes = {"": probe}
    for name, stacked in hooked.items():
        layers = jax.tree.leaves(params[name])[0].shape[:1] if stacked else ()
        probes[name] = jnp.broadcast_to(probe, layers)
    return probes


def _prepare(
    whole: Any, params: Any, probes: Any, collectors: Any, hooked: Mapping[str, bool]
) -> Any:
    """The parameters as the loss function sees them: `Shard`s where it gathers, else whole."""

    def one(path: Any, collect: Any, value: jax.Array, target: jax.Array) -> Any:
        name = jax.tree_util.keystr(path[:1], simple=True)
        if name in hooked:
            return Shard((value, target), probes[name], collect)
        return collect((value, target), probes[""], None)

    return jax.tree_util.tree_map_with_path(one, collectors, whole, params)


def _report(
    layout: Layout, leaves: Any, grads: Any, aux: Any, how: Reduction, zero: jax.Array
) -> BackwardReport:
    """Every group's scalars in group order, their means, and the global norm."""
    k = layout.local_groups
    scalars, tree = jax.tree.flatten(aux)
    table = jnp.stack([x.astype(jnp.float32).reshape(k) for x in scalars], axis=-1)
    table = lax.all_gather(table, ("data", "fsdp")).reshape(layout.data, layout.fsdp, k, -1)
    table = table.swapaxes(1, 2).reshape(layout.groups, -1)
    group_loss, square, _ = jax.tree.unflatten(tree, list(table.T))
    loss, _, metrics = jax.tree.unflatten(tree, list(fold(table) / layout.groups))
    norm = jnp.sqrt(_global_square(layout, leaves, grads, how, zero))
    return BackwardReport(loss, norm, group_loss, jnp.sqrt(square), metrics)


def _global_square(
    layout: Layout, leaves: Any, grads: Any, how: Reduction, zero: jax.Array
) -> jax.Array:
    """Squared norm of the gradient, summed in blocks and in an order that no mesh changes."""
    flat = zip(jax.tree.leaves(leaves, is_leaf=_is_layout), jax.tree.leaves(grads), strict=True)
    sums = [(leaf, _block_squares(layout, leaf, how.fence(g * g, zero))) for leaf, g in flat]
    # A device's place on a sharded axis is f*D + d.
    row = jnp.concatenate([blocks for _, blocks in sums])
    table = lax.all_gather(row, ("fsdp", "data")).reshape(layout.shards, -1)
    parts = jnp.split(table, list(accumulate(len(blocks) for _, blocks in sums))[:-1], axis=1)
    # A replicated parameter has all of its blocks in every row: the first will do.
    own = [
        (p[0] if leaf.axis is None else p.reshape(-1))
        for (leaf, _), p in zip(sums, parts, strict=True)
    ]
    return fold(jnp.stack([fold(blocks) for blocks in own]))


def _block_squares(layout: Layout, leaf: LeafLayout, squares: jax.Array) -> jax.Array:
    """Sum of each block of this device's part of a parameter, [blocks here].

    Axes are split into blocks, parts of other mesh axes and the elements of one part. The
    elements are summed first, so that nothing moves between devices before it is small.
    """
    here = leaf.blocks if leaf.axis is None else leaf.blocks // layout.shards
    sizes: list[int] = []
    kinds: list[str] = []
    for i, size in enumerate(squares.shape):
        name = leaf.spec[i] if i < len(leaf.spec) else None
        outer, kind = layout.mesh.shape[name] if isinstance(name, str) else 1, "part"
        if i - squares.ndim == leaf.block_axis:
            outer, kind = here, "block"
        if outer > 1 or kind == "block":
            sizes, kinds = [*sizes, outer], [*kinds, kind]
        if kinds and kinds[-1] == "element":
            sizes[-1] *= size // outer  # one long axis is summed in fewer operations than two
        else:
            sizes, kinds = [*sizes, size // outer], [*kinds, "element"]
    x = squares.reshape(sizes)
    for kind in ("element", "part"):
        for axis in reversed([i for i, k in enumerate(kinds) if k == kind]):
            x, kinds = fold(x, axis), kinds[:axis] + kinds[axis + 1 :]
    return x.reshape(here if leaf.block_axis is not None else 1)


def _is_layout(x: Any) -> bool:
    return isinstance(x, LeafLayout)
