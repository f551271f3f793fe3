"""Where every parameter, and every group of the global batch, lies on the mesh.

A parameter is sharded over fsdp and data together along one axis, and over the tensor
axis along the axes that the logical rules name. Which axis is chosen depends on its shape
and on the number of groups alone, never on the mesh, so that the blocks in which the
global norm is summed are the same on every mesh.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrel.exit_codes import UsageError

BATCH_SPEC = P("data", None, "fsdp")
"""A batch [data, local groups, fsdp, rows, ...]: group d*(k*F) + j*F + f at [d, j, f]."""


@dataclass(frozen=True)
class LeafLayout:
    """How one parameter is divided."""

    dtype: Any
    """dtype of the parameter."""
    spec: P
    """Mesh axes of every array axis, automatic ones (tensor) included."""
    axis: int | None
    """The axis sharded over (fsdp, data), counted from the end; None when replicated."""
    block_axis: int | None
    """The axis along which the norm is summed in blocks, counted from the end."""
    blocks: int
    """Number of those blocks in the whole parameter; the same on every mesh."""

    @property
    def manual(self) -> P:
        """The part of `spec` that speaks of data and fsdp."""
        if self.axis is None:
            return P()
        entries: list[Any] = [None] * (len(self.spec) + self.axis) + [("fsdp", "data")]
        return P(*entries)


@dataclass(frozen=True)
class Layout:
    """A mesh, the groups of the global batch on it, and the rules for parameters."""

    mesh: Mesh
    groups: int
    rules: Mapping[str, str]

    def __post_init__(self) -> None:
        missing = {"data", "fsdp"} - set(self.mesh.shape)
        if missing:
            raise UsageError(
                f"mesh: got axes {tuple(self.mesh.shape)}: needs data and fsdp (1 is allowed)"
            )
        if self.groups % self.shards:
            raise UsageError(
                f"batch.groups: got {self.groups}: mesh.data {self.data} x mesh.fsdp {self.fsdp}"
                f" = {self.shards} must divide it"
            )

    @property
    def data(self) -> int:
        """Degree of the data axis."""
        return self.mesh.shape["data"]

    @property
    def fsdp(self) -> int:
        """Degree of the fsdp axis."""
        return self.mesh.shape["fsdp"]

    @property
    def shards(self) -> int:
        """Devices on the batch axes: data x fsdp."""
        return self.data * self.fsdp

    @property
    def local_groups(self) -> int:
        """Groups that each device on the batch axes handles in turn."""
        return self.groups // self.shards

    @property
    def manual_axes(self) -> frozenset[str]:
        """Axes that the step handles by hand; the compiler handles the rest."""
        trivial = {name for name, size in self.mesh.shape.items() if size == 1}
        return frozenset({"data", "fsdp"} | trivial)

    def sharding(self, spec: P) -> NamedSharding:
        """`spec` on this mesh."""
        return NamedSharding(self.mesh, spec)

    def leaf(
        self, shape: tuple[int, ...], dtype: Any, axes: Sequence[str | None] | None, stacked: bool
    ) -> LeafLayout:
        """The layout of a parameter of `shape` and `dtype` with logical `axes`.

        `stacked` says that axis 0 counts layers, which are scanned and never divided.
        """
        names: list[Any] = [self.rules.get(a) if a else None for a in axes or (None,) * len(shape)]
        entries: list[Any] = [n if self.mesh.shape.get(n, 1) > 1 else None for n in names]
        free = [i for i in range(int(stacked), len(shape)) if names[i] is None]
        best = max(free, key=lambda i: (gcd(shape[i], self.groups), shape[i], -i), default=None)
        blocks = 1 if best is None else gcd(shape[best], self.groups)
        if best is None or blocks % self.shards:
            block_axis = None if best is None else best - len(shape)
            return LeafLayout(dtype, P(*entries), None, block_axis, blocks)
        entries[best] = ("fsdp", "data")
        axis = best - len(shape)
        return LeafLayout(dtype, P(*entries), axis, axis, blocks)

    def tree(self, params: Any, axes: Any | None, stacked: Mapping[str, bool]) -> Any:
        """The layout of every leaf of (abstract) `params`; `axes` has tuples at the leaves."""

        def one(path: tuple[Any, ...], leaf: Any, names: Any) -> LeafLayout:
            top = jax.tree_util.keystr(path[:1], simple=True)
            if names is not None and len(names) != len(leaf.shape):
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                raise UsageError(f"logical axes of {where}: got {names}: shape is {leaf.shape}")
            return self.leaf(tuple(leaf.shape), leaf.dtype, names, stacked.get(top, False))

        if axes is None:
            return jax.tree_util.tree_map_with_path(lambda p, x: one(p, x, None), params)
        return jax.tree_util.tree_map_with_path(
            one, params, axes, is_leaf=lambda x: hasattr(x, "shape")
        )

    def group_ids(self) -> np.ndarray:
        """The group at each place [data, local groups, fsdp] of the batch."""
        return np.arange(self.groups).reshape(self.data, self.local_groups, self.fsdp)

    def process_groups(self) -> list[int]:
        """The groups that this process's devices handle, in ascending order."""
        ids = self.group_ids()
        where = self.sharding(BATCH_SPEC).addressable_devices_indices_map(ids.shape)
        return sorted({int(g) for index in where.values() for g in ids[index].ravel()})

    def place(self, batch: Any) -> Any:
        """Put this process's groups on its devices.

        `batch` is a tree of host arrays [len(process_groups()), rows, ...] in the order of
        `process_groups()`; the result is [data, local groups, fsdp, rows, ...], global.
        """
        ids, mine = self.group_ids(), {g: i for i, g in enumerate(self.process_groups())}
        sharding = self.sharding(BATCH_SPEC)

        def put(x: Any) -> jax.Array:
            x = np.asarray(x)

            def rows(index: Any) -> np.ndarray:
                places = ids[index[:3]]
                found = x[[mine[int(g)] for g in places.ravel()]]
                return found.reshape(places.shape + x.shape[1:])

            return jax.make_array_from_callback(ids.shape + x.shape[1:], sharding, rows)

        return jax.tree.map(put, batch)

    def split(self, batch: Any) -> Any:
        """A whole global batch [global batch, ...] as this process's groups, for `place`."""
        mine = self.process_groups()

        def divide(x: Any) -> np.ndarray:
            x = np.asarray(x)
            if x.shape[0] % self.groups:
                raise UsageError(
                    f"batch: got {x.shape[0]} rows: {self.groups} groups must divide them"
                )
            return x.reshape(self.groups, -1, *x.shape[1:])[mine]

        return jax.tree.map(divide, batch)

    def rank_values(self, group_norms: Any, *, rms: bool = True) -> np.ndarray:
        """Per-rank values [data, fsdp] from per-group ones [groups].

        A rank's gradient norm is the root mean square of its groups'; its loss is their
        mean (`rms=False`).
        """
        x = np.asarray(group_norms, np.float64).reshape(self.data, self.local_groups, self.fsdp)
        return np.sqrt(np.mean(x * x, axis=1)) if rms else np.mean(x, axis=1)
