"""A small state of every kind of leaf, a function of the step alone, on any mesh.

Used by the tests and by the processes that they start.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_map_with_path

_SPLIT = {"w": PartitionSpec(None, "data", "fsdp"), "mu": PartitionSpec(None, ("data", "fsdp"))}


def mesh(data: int, fsdp: int) -> Mesh:
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), devices=jax.devices()[: data * fsdp])


def host_state(step: int, width: int = 16) -> Any:
    """The state on the host: params, Adam's moments and counts, keys and odd leaves."""
    rng = np.random.default_rng(step)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    params = {
        "w": normal(4, width, 32),
        "scale": normal(4, width).astype(ml_dtypes.bfloat16),
        "bias": normal(7),
    }
    adam = optax.adamw(1e-3, mu_dtype=jnp.float32).init(params)
    moments = jax.tree.map(lambda x: np.asarray(x) + np.ones_like(x) * step, adam)
    return {
        "params": params,
        "opt_state": moments,
        "rng": jax.random.key(step),
        "keys": jax.random.split(jax.random.key(step, impl="rbg"), 4),
        "step": np.int32(step),
        "mask": np.array([True, False, True, step % 2 == 0]),
        "bytes": rng.integers(0, 256, 11, dtype=np.uint8),
        "nothing": np.zeros((0, 3), np.float32),
        "nan": np.array([0x7FC00001, 0xFF812345], np.uint32).view(np.float32),
    }


def shardings(tree: Any, on: Mesh) -> Any:
    """`w` split over both axes, the first moment over its second axis, the rest replicated."""

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = keystr(path, simple=True, separator="/")
        spec = PartitionSpec()
        if name.endswith("/w"):
            spec = _SPLIT["mu" if "/mu/" in name else "w"]
        if name == "keys":
            spec = PartitionSpec("fsdp") if 4 % on.shape["fsdp"] == 0 else spec
        return NamedSharding(on, spec)

    return tree_map_with_path(one, tree)


def make(step: int, on: Mesh, width: int = 16) -> Any:
    """The state of `step` on the devices of a mesh, of one process or of several."""
    host = host_state(step, width)
    return jax.tree.map(_put, host, shardings(host, on))


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(leaf))
        data = _put(np.asarray(jax.random.key_data(leaf)), sharding)
        return jax.random.wrap_key_data(data, impl=impl)
    value = np.asarray(leaf)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def abstract(on: Mesh, width: int = 16) -> Any:
    host = host_state(0, width)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        host,
        shardings(host, on),
    )


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Every leaf's dtype, shape and bytes; equal for two states that are the same bits."""

    def one(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
        kind = str(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return kind, leaf.shape, np.asarray(leaf).tobytes()

    return [one(leaf) for leaf in jax.tree.leaves(tree)]
