"""Who keeps which block of a state: one process of every host that holds it, and a peer.

A block that lives on the devices of one host alone is copied to the next host, device to device,
by one `ppermute` over the whole mesh: then the loss of any one host loses no block.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxrel.checkpoint.local_files import Piece

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """A block that this process keeps: its number, and the device whose shard it is."""

    number: int
    path: str
    device: Any


@dataclass(frozen=True)
class Plan:
    """Which blocks there are, and which of them this process keeps."""

    pieces: list[Piece]
    """Of the whole state, in the same order on all processes."""
    own: list[Kept]
    copies: list[Kept]
    """From the arrays that `moved` returns."""
    paths: list[str]
    """Leaves with a block that one host alone holds: those that are moved."""
    mesh: Mesh | None
    permutation: tuple[tuple[int, int], ...]
    """(From, to): flat positions on the mesh."""


def plan(arrays: Mapping[str, jax.Array], hosts: Sequence[int]) -> Plan:
    """What this process keeps of `arrays`; `hosts` has the host of each process."""
    me, host_of = jax.process_index(), lambda device: hosts[device.process_index]
    mesh = next((m for x in arrays.values() if (m := _mesh(x)) is not None), None)
    permutation = {} if mesh is None else _to_next_host(mesh, hosts)
    found = Plan([], [], [], [], mesh, ())
    lonely: dict[str, None] = {}
    for path in sorted(arrays):
        array = arrays[path]
        movable = bool(permutation) and _mesh(array) == mesh
        for (start, stop), holders in sorted(_blocks(array).items()):
            number = len(found.pieces)
            found.pieces.append(Piece(path, start, stop))
            for host in {host_of(device) for device in holders}:
                keeper = min((d for d in holders if host_of(d) == host), key=_order)
                if keeper.process_index == me:
                    found.own.append(Kept(number, path, keeper))
            if len({host_of(device) for device in holders}) == 1 and movable:
                lonely[path] = None
                copy = permutation[min(holders, key=_order)]
                if copy.process_index == me:
                    found.copies.append(Kept(number, path, copy))
    assert mesh is not None or not permutation
    flat = {} if mesh is None else {device: i for i, device in enumerate(mesh.devices.flat)}
    steps = tuple((flat[a], flat[b]) for a, b in permutation.items()) if permutation else ()
    return Plan(found.pieces, found.own, found.copies, list(lonely), mesh, steps)


def moved(arrays: Mapping[str, jax.Array], plan: Plan) -> dict[str, jax.Array]:
    """The arrays of `plan.paths`, each device's shard now being that of the host before its own.

    Collective. The results are no global arrays in any sense: look at their shards alone.
    """
    if not plan.paths:
        return {}
    assert plan.mesh is not None
    values = [arrays[path] for path in plan.paths]
    specs = tuple(x.sharding.spec for x in values if isinstance(x.sharding, NamedSharding))
    with jax.set_mesh(plan.mesh):
        return dict(zip(plan.paths, _move(plan.mesh, specs, plan.permutation)(values), strict=True))


def overlap(
    start: Sequence[int], stop: Sequence[int], piece: Piece
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where the block `start` to `stop` and a piece meet, in the block and in the piece."""
    low = [max(a, b) for a, b in zip(start, piece.start, strict=True)]
    high = [min(a, b) for a, b in zip(stop, piece.stop, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    ends = list(zip(low, high, strict=True))
    mine = tuple(slice(a - s, b - s) for (a, b), s in zip(ends, start, strict=True))
    return mine, tuple(slice(a - s, b - s) for (a, b), s in zip(ends, piece.start, strict=True))


def bounds(index: Any, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and stop of a shard's index."""
    ends = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return tuple(a for a, _ in ends), tuple(b for _, b in ends)


def _blocks(array: jax.Array) -> dict[tuple[Any, Any], list[Any]]:
    """The devices that hold each block of an array."""
    found: dict[tuple[Any, Any], list[Any]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        found.setdefault(bounds(index, array.shape), []).append(device)
    return found


def _to_next_host(mesh: Mesh, hosts: Sequence[int]) -> dict[Any, Any]:
    """For each device the one on the next host that gets a copy of its shards; {} for one host."""
    by_host: dict[int, list[Any]] = {}
    for device in sorted(mesh.devices.flat, key=_order):
        by_host.setdefault(hosts[device.process_index], []).append(device)
    rows = list(by_host.values())
    if len(rows) < 2:
        return {}
    if len({len(row) for row in rows}) > 1:
        counts = ", ".join(str(len(row)) for row in rows)
        log.warning("no copies on other hosts: they have different numbers of devices (%s)", counts)
        return {}
    pairs = zip(rows, [*rows[1:], rows[0]], strict=True)
    return {a: b for here, there in pairs for a, b in zip(here, there, strict=True)}


@lru_cache(maxsize=2)
def _move(mesh: Mesh, specs: tuple[Any, ...], permutation: tuple[tuple[int, int], ...]) -> Any:
    def move(shards: list[jax.Array]) -> list[jax.Array]:
        return [lax.ppermute(x, mesh.axis_names, permutation) for x in shards]

    # Each device keeps its own result, also of what is replicated.
    return jax.jit(
        jax.shard_map(
            move, mesh=mesh, in_specs=(list(specs),), out_specs=list(specs), check_vma=False
        )
    )


def _mesh(array: jax.Array) -> Mesh | None:
    mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def _order(device: Any) -> tuple[int, int]:
    return device.process_index, device.id
