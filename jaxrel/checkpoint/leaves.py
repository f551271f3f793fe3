"""A state's leaves as they are described, digested, stored and brought back.

Orbax gets one flat folder of plain arrays, named by the leaf's path: a typed random key is
stored as its key data, and a leaf without elements is not stored at all.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrel.digest import dtype_name, leaf_paths, sharded_tree_words, tree_words
from jaxrel.exit_codes import UsageError


def is_key(leaf: Any) -> bool:
    """Whether a leaf, concrete or abstract, is a typed random key."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def kinds(tree: Any) -> dict[str, dict[str, Any]]:
    """Shape and dtype of each leaf by path; the tree may be abstract.

    Raises UsageError if the tree has no leaves or two leaves share a path.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise UsageError("the state has no leaves")
    found: dict[str, dict[str, Any]] = {}
    for path, leaf in zip(leaf_paths(tree), leaves, strict=True):
        if path in found:
            raise UsageError(f"the state has two leaves with the path {path!r}")
        found[path] = {"shape": list(leaf.shape), "dtype": dtype_name(leaf)}
    return found


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves by path."""
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def as_arrays(tree: Any) -> Any:
    """The tree with NumPy leaves and Python numbers copied to the device, the rest as it is.

    Raises UsageError for a leaf that is no array, that JAX would narrow to 32 bits, or that
    is local to one process of several.
    """
    return jax.tree_util.tree_map_with_path(_as_array, tree)


def _as_array(path: Any, leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.Array):
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            raise UsageError(f"{_name(path)}: this array lives on one process of several")
        return leaf
    if jax.process_count() > 1:
        raise UsageError(f"{_name(path)}: with several processes, leaves must be jax.Arrays")
    dtype = np.asarray(leaf).dtype
    number = isinstance(leaf, (bool, int, float, complex))
    if dtype.kind in "OUSMm" or not (number or jax.dtypes.canonicalize_dtype(dtype) == dtype):
        raise UsageError(
            f"{_name(path)}: {type(leaf).__name__} of dtype {dtype} does not fit a JAX array;"
            " convert it, or leave it out of the state"
        )
    return jnp.array(leaf, copy=True)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def words(tree: Any) -> np.ndarray:
    """The digests of all leaves, computed where they are: uint32 [leaves, 2] on the host.

    Collective: every process of the job calls it and gets all of them.
    """
    leaves = jax.tree.leaves(tree)
    mesh = mesh_of(leaves)
    shardings = [leaf.sharding for leaf in leaves]
    with jax.set_mesh(mesh):  # an ambient mesh of other devices would refuse these arrays
        if all(isinstance(s, NamedSharding) and s.mesh == mesh for s in shardings):
            return np.asarray(_words_of_shards(mesh, tuple(s.spec for s in shardings))(leaves))
        return np.asarray(_words_on(NamedSharding(mesh, PartitionSpec()))(leaves))


@lru_cache(maxsize=8)
def _words_of_shards(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    """With one collective for all leaves, where the compiler would make one for each."""
    return jax.jit(lambda leaves: sharded_tree_words(leaves, list(specs), mesh)[0])


@lru_cache(maxsize=8)
def _words_on(sharding: NamedSharding) -> Any:
    return jax.jit(tree_words, out_shardings=sharding)


def mesh_of(leaves: list[Any]) -> Mesh:
    """The mesh on which the leaves, concrete or abstract, live; else one of their devices.

    Raises UsageError if they are tied to different sets of devices.
    """
    shardings = [
        leaf.sharding
        for leaf in leaves
        if getattr(leaf, "sharding", None) is not None and getattr(leaf, "committed", True)
    ]
    if not shardings:
        return Mesh(np.array(jax.local_devices()[:1]), ("device",))
    counts = {len(sharding.device_set) for sharding in shardings}
    if len({frozenset(sharding.device_set) for sharding in shardings}) > 1:
        raise UsageError(
            f"the leaves of the state live on different sets of devices ({sorted(counts)} of them):"
            " give every leaf a sharding on the same mesh"
        )
    for sharding in shardings:
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    devices = sorted(shardings[0].device_set, key=lambda device: device.id)
    return Mesh(np.array(devices), ("device",))


def stored(tree: Any) -> dict[str, jax.Array]:
    """The plain arrays that are written, by leaf path."""
    arrays = {}
    for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
        if leaf.size:
            arrays[path] = jax.random.key_data(leaf) if is_key(leaf) else leaf
    return arrays


def stored_specs(abstract: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of the plain array that holds each leaf, by path.

    A leaf without a sharding is replicated over the devices of the others.
    """
    leaves = jax.tree.leaves(abstract)
    replicated = NamedSharding(mesh_of(leaves), PartitionSpec())
    specs = {}
    for path, leaf in zip(leaf_paths(abstract), leaves, strict=True):
        sharding = getattr(leaf, "sharding", None) or replicated
        spec = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if is_key(leaf):  # one axis more, never split: the key's sharding still fits
            spec = jax.eval_shape(jax.random.key_data, spec)
        specs[path] = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)
    return specs


def values(
    arrays: Mapping[str, jax.Array],
    specs: Mapping[str, jax.ShapeDtypeStruct],
    key_impls: Mapping[str, str],
) -> dict[str, jax.Array]:
    """The leaves by path from their stored arrays; `key_impls` names each key's by path."""
    found = {}
    for path, spec in specs.items():
        array = arrays[path] if path in arrays else _empty(spec)
        impl = key_impls.get(path)
        found[path] = jax.random.wrap_key_data(array, impl=impl) if impl else array
    return found


def fitted(template: Any, found: Mapping[str, jax.Array]) -> Any:
    """The tree of `template` with the leaves of `found`, cast where it has other dtypes.

    A leaf that was not found stays as it is in the template.
    """
    new = []
    for path, leaf in zip(leaf_paths(template), jax.tree.leaves(template), strict=True):
        value = found.get(path, leaf)
        if value.dtype != leaf.dtype:
            value = jax.jit(lambda x, to=leaf.dtype: x.astype(to))(value)
        new.append(value)
    return jax.tree.unflatten(jax.tree.structure(template), new)


def nodes(tree: Any, prefix: str = "") -> dict[str, str]:
    """The type of everything in `tree` that is no leaf, by path; the root's path is empty."""
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if children and not children[0][0]:
        return {}  # a leaf
    found = {prefix: type(tree).__name__}
    for path, child in children:
        found |= nodes(child, f"{prefix}/{_name(path)}" if prefix else _name(path))
    return found


def _empty(spec: jax.ShapeDtypeStruct) -> jax.Array:
    """An array without elements."""
    return jax.make_array_from_callback(
        spec.shape, spec.sharding, lambda index: np.empty(spec.shape, spec.dtype)[index]
    )
