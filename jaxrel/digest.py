"""The digest of an array's bits: exact, and free of how the array is sharded.

Every element's bits are mixed with its index in the whole array by a function that is
one-to-one in the bits, and the results are summed modulo 2**32, twice with different
constants. Integer sums have no order, so any sharding gives the same two words; one
flipped bit always changes both.

`leaf_words` runs on devices, inside or outside `jit`; `jaxrel.digest_host` is its twin.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrel.digest_host import LANES, as_hex, combine, kind


def dtype_name(x: Any) -> str:
    """The dtype as it is recorded; a typed random key names its implementation."""
    return str(x.dtype)


def leaf_words(
    x: jax.Array, start: Sequence[Any] | None = None, shape: Sequence[int] | None = None
) -> jax.Array:
    """The digest of one array of any shape and dtype: uint32 [2].

    An element's index is two words, its last axis and its row (all other axes, flattened),
    so that arrays of more than 2**32 elements keep distinct indices. For a shard, `start`
    is the index of its first element in the whole array of `shape`: the digests of all
    shards sum, modulo 2**32, to that of the whole. (Not for random keys: give key data.)
    """
    start, shape = tuple(start or ()) or None, tuple(shape or ()) or None
    return _sums(jnp.asarray(x), start, shape)[:2]


# Its own `jit`, so that leaves of one shape are traced and lowered once: parameters and moments.
@partial(jax.jit, static_argnames="shape")
def _sums(
    x: jax.Array, start: tuple[Any, ...] | None = None, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """The two words of `leaf_words`, and how many elements are NaN or infinite: uint32 [3]."""
    start, shape = start or (0,) * x.ndim, shape or x.shape
    if _is_key(x):
        x = jax.random.key_data(x)
        start, shape = (0,) * x.ndim, x.shape
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x, start, shape = jnp.stack([x.real, x.imag], axis=-1), (*start, 0), (*shape, 2)
    if x.dtype == jnp.bool_ or _is_narrow(x.dtype):
        x = x.astype(jnp.int8)
    x = jnp.atleast_1d(x)
    bad = ~jnp.isfinite(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(x.shape, bool)
    unsigned = jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")
    words = lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    if x.dtype.itemsize == 8:  # two words an element, on a last axis twice as long
        words = words.reshape(*x.shape[:-1], 2 * x.shape[-1])
        bad = jnp.stack([bad, jnp.zeros_like(bad)], axis=-1).reshape(words.shape)
    start, shape = start or (0,), shape or (1,)
    per_element = 2 if x.dtype.itemsize == 8 else 1
    column = _index(words, words.ndim - 1, start[-1] * per_element)
    row, stride = jnp.zeros_like(column), 1
    for axis in reversed(range(words.ndim - 1)):
        row = row + _index(words, axis, start[axis]) * jnp.uint32(stride & 0xFFFFFFFF)
        stride *= shape[axis]
    lanes = []
    for c, r, m1, m2 in LANES:
        h = (words ^ (column * jnp.uint32(c) + row * jnp.uint32(r))) * jnp.uint32(m1)
        lanes.append((h ^ (h >> 15)) * jnp.uint32(m2))
    lanes.append(bad.astype(jnp.uint32))
    # One reduction of all three: XLA fuses it into a single pass that stores nothing.
    zeros = (jnp.uint32(0),) * len(lanes)
    sums = lax.reduce(tuple(lanes), zeros, _add_lanes, tuple(range(words.ndim)))
    return jnp.stack(sums)


def _index(words: jax.Array, axis: int, start: Any) -> jax.Array:
    index = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return index + jnp.asarray(start).astype(jnp.uint32)


def _add_lanes(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_narrow(dtype: Any) -> bool:
    """Integers of less than a byte, which have no bit pattern of their own in memory."""
    return jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8


def tree_words(tree: Any) -> jax.Array:
    """The digests of all leaves, in the order of `jax.tree.leaves`: uint32 [leaves, 2]."""
    return jnp.stack([leaf_words(leaf) for leaf in jax.tree.leaves(tree)])


def sharded_tree_words(tree: Any, specs: Any, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """`tree_words` of arrays on `mesh`, with one pass over them and one collective.

    Returns the words, uint32 [leaves, 2], and how many elements of each leaf are NaN or
    infinite, uint32 [leaves] (modulo 2**32). Runs under `jit`; `specs` has a PartitionSpec for
    every leaf.
    """
    leaves = jax.tree.leaves(tree)
    flat = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))
    leaves = [jax.random.key_data(x) if _is_key(x) else x for x in leaves]
    shapes = [x.shape for x in leaves]

    def words(shards: list[jax.Array]) -> jax.Array:
        table = [
            _shard_words(x, shape, spec, mesh)
            for x, shape, spec in zip(shards, shapes, flat, strict=True)
        ]
        return lax.psum(jnp.stack(table), mesh.axis_names)

    table = jax.shard_map(words, mesh=mesh, in_specs=(flat,), out_specs=P(), check_vma=False)(
        leaves
    )
    return table[:, :2], table[:, 2]


def _shard_words(x: jax.Array, shape: tuple[int, ...], spec: P, mesh: Mesh) -> jax.Array:
    """This device's part of `_sums`; nothing from those that hold only a replica."""
    axes = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
    axes += [()] * (x.ndim - len(axes))
    start = [lax.axis_index(a) * n if a else 0 for a, n in zip(axes, x.shape, strict=True)]
    others = [a for a in mesh.axis_names if a not in sum(axes, ())]
    mine = lax.axis_index(tuple(others)) == 0 if others else True
    return jnp.where(mine, _sums(x, tuple(start), shape), jnp.uint32(0))


def leaf_paths(tree: Any) -> list[str]:
    """Each leaf's path, as `a/b/0`, in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def leaf_digests(tree: Any, words: Any) -> dict[str, str]:
    """Digest of each leaf by path: 16 hex digits.

    `tree` may be abstract; `words` is what `tree_words` gave for it, on the host.
    """
    words = np.asarray(words)
    return {path: as_hex(w) for path, w in zip(leaf_paths(tree), words, strict=True)}


def state_digest(tree: Any, words: Any) -> str:
    """One digest for a whole tree: 32 hex digits over path, dtype, shape and leaf digests."""
    leaves = dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))
    kinds = {path: kind(dtype_name(x), x.shape) for path, x in leaves.items()}
    return combine(kinds, leaf_digests(tree, words))
