"""The local tier: checkpoints on a RAM disk or NVMe of each host, often, beside the durable ones.

Every process writes what it keeps of the state (`pieces`) to its own host's disk, one file a step
(`local_files`). Whether a step is whole is decided when it is wanted, from what all processes then
see: so hosts need not share a disk, and one may be lost.
"""

import contextlib
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrel.checkpoint import local_files
from jaxrel.checkpoint.errors import DamagedError
from jaxrel.checkpoint.flight import Landed
from jaxrel.checkpoint.local_files import LocalFile, Piece
from jaxrel.checkpoint.pieces import Kept, Plan, bounds, moved, overlap, plan
from jaxrel.checkpoint.together import agreed, from_everyone, together

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Whole:
    """A step of which all processes together see every piece; but for `files` the same on all."""

    step: int
    manifest: dict[str, Any]
    pieces: list[Piece]
    files: list[LocalFile]
    """Those that this process sees."""


class LocalTier:
    """What one run keeps in `directory`, a path that each host has for itself.

    Its methods are collective: every process of the job makes the same calls. A save that fails
    is logged and the run goes on, for the durable checkpoints are what counts.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._writing: threading.Thread | None = None
        self._good = -1
        """Step of this process's newest complete file."""
        self._hosts: list[int] | None = None
        self._plan: tuple[Any, Plan] | None = None
        self.newest: Landed | None = None
        """The newest save that this process completed."""
        self._landed: deque[Landed] = deque(maxlen=100)

    def save(
        self, step: int, described: Mapping[str, Any], arrays: Mapping[str, jax.Array]
    ) -> bool:
        """Copy what this process keeps of `arrays` off the devices, and write it behind.

        `described` is the manifest of the step, `arrays` the stored leaves. False where a process
        still writes the last one: this step is then left out by all.
        """
        started = time.monotonic()
        busy = self._writing is not None and self._writing.is_alive()
        everyone = from_everyone([busy, self._good])
        if any(busy for busy, _ in everyone):
            log.warning("no local save of step %d: the one before is still being written", step)
            return False
        if self._hosts is None:
            self._hosts = hosts_of(self.directory)
        described = agreed(lambda: dict(described))
        kept = self._kept(arrays)
        blocks = _on_host(arrays, kept.own) | _on_host(moved(arrays, kept), kept.copies)
        oldest = min(good for _, good in everyone)  # what all have, and may need together
        handed_over, rank = time.monotonic(), jax.process_index()

        def write() -> None:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                # A process whose saves fail must not fill the disks of the others.
                before = max(oldest, local_files.last_but_one(self.directory, rank))
                local_files.delete(self.directory, before=before)
                file = self.directory / f"{step}.{rank}.npz"
                local_files.write(file, described, kept.pieces, blocks)
            except OSError as error:
                log.warning("the local save of step %d failed: %s", step, error)
                return
            self._good = step
            took = time.monotonic() - started
            self.newest = Landed(step, took, handed_over - started, described["state_digest"])
            self._landed.append(self.newest)

        self._writing = threading.Thread(target=write, name="local checkpoint", daemon=True)
        self._writing.start()
        return True

    def landed(self) -> list[Landed]:
        """The saves that this process completed since this was called last."""
        return [self._landed.popleft() for _ in range(len(self._landed))]

    def wait(self, seconds: float | None = None) -> None:
        """Join the file that is being written."""
        if self._writing is not None:
            self._writing.join(seconds)

    def whole(self) -> list[Whole]:
        """The steps that can be restored for all that is known, the newest first."""
        files = local_files.scan(self.directory)
        mine = [[f.save, _mask(f.held)] for f in files]
        total: dict[str, int] = {}
        for save, held in (row for rows in from_everyone(mine) for row in rows):
            total[save] = total.get(save, 0) | int(held, 16)
        found = []
        for save in sorted(total, key=lambda save: (-int(save.split()[0]), save)):
            if total[save] == (1 << int(save.split()[-1])) - 1:
                seen = [f for f in files if f.save == save]
                described, pieces = _from_first(
                    [seen[0].manifest, seen[0].pieces] if seen else None
                )
                listed = [Piece(path, tuple(a), tuple(b)) for path, a, b in pieces]
                found.append(Whole(described["step"], described, listed, seen))
        return found

    def read(self, whole: Whole, specs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """The stored leaves `specs` of a step, each on its devices.

        A piece that a process cannot read comes from one that can. Raises DamagedError, on all
        processes, where none can.
        """
        with local_files.Blocks(whole.files) as blocks:
            reader = together(lambda: _Reader(whole, blocks, specs))
            missing = {number for row in from_everyone(reader.lacking) for number in row}
            for number in sorted(missing):
                reader.exchange(number)
        return reader.arrays()

    def forget(self, *, before: int | None = None, after: int | None = None) -> None:
        """Delete the files of steps below `before` and above `after`: they are never taken again.

        Each process does so on its own host.
        """
        self.wait()
        self._good = -1
        try:
            local_files.delete(self.directory, before=before, after=after)
        except OSError as error:
            log.warning("local checkpoints in %s stay: %s", self.directory, error)

    def _kept(self, arrays: Mapping[str, jax.Array]) -> Plan:
        key = {path: (x.shape, x.sharding) for path, x in arrays.items()}
        if self._plan is None or self._plan[0] != key:
            assert self._hosts is not None
            self._plan = key, plan(arrays, self._hosts)
        return self._plan[1]


class _Reader:
    """The blocks that this process's devices want of one step, put together from its pieces."""

    def __init__(
        self,
        whole: Whole,
        blocks: local_files.Blocks,
        specs: Mapping[str, jax.ShapeDtypeStruct],
    ) -> None:
        """Reads what is on this host; `lacking` are the numbers of the pieces that are not."""
        self._whole, self._blocks = whole, blocks
        self._specs = {path: spec for path, spec in specs.items() if spec.size}
        self._shards = {
            path: {shard: np.empty(_shape(*shard), spec.dtype) for shard in _shards(spec)}
            for path, spec in self._specs.items()
        }
        self.lacking: list[int] = []
        for number, piece in enumerate(whole.pieces):
            if self._wants(piece):
                block = self._read(number)
                if block is None:
                    self.lacking.append(number)
                else:
                    self._fill(piece, block)

    def exchange(self, number: int) -> None:
        """Take a piece from the first process that can read it. Collective."""
        piece, block = self._whole.pieces[number], self._read(number)
        readers = from_everyone(None if block is None else len(block))
        first = next((rank for rank, size in enumerate(readers) if size is not None), None)
        if first is None:
            where = f"local checkpoint of step {self._whole.step}"
            raise DamagedError(f"{where}: a part of {piece.path} is on no disk, or damaged")
        mine = block if first == jax.process_index() else np.zeros(readers[first], np.uint8)
        sent = multihost_utils.broadcast_one_to_all(mine, is_source=first == jax.process_index())
        if self._wants(piece):
            self._fill(piece, np.asarray(sent))

    def arrays(self) -> dict[str, jax.Array]:
        """The leaves on their devices; what was put together is let go on the way."""
        return {path: self._array(path, spec) for path, spec in self._specs.items()}

    def _array(self, path: str, spec: jax.ShapeDtypeStruct) -> jax.Array:
        shards = self._shards.pop(path)
        return jax.make_array_from_callback(
            spec.shape, spec.sharding, lambda index: shards[bounds(index, spec.shape)]
        )

    def _read(self, number: int) -> np.ndarray | None:
        piece = self._whole.pieces[number]
        size = math.prod(piece.shape) * self._specs[piece.path].dtype.itemsize
        return self._blocks.read(number, size)

    def _wants(self, piece: Piece) -> bool:
        return any(overlap(*shard, piece) for shard in self._shards.get(piece.path, ()))

    def _fill(self, piece: Piece, data: np.ndarray) -> None:
        block = data.view(self._specs[piece.path].dtype).reshape(piece.shape)
        for shard, values in self._shards[piece.path].items():
            if both := overlap(*shard, piece):
                here, there = both
                values[here] = block[there]


def hosts_of(directory: Path) -> list[int]:
    """For each process, the lowest one that sees the same `directory`. Collective; makes it."""
    if jax.process_count() == 1:
        return [0]
    token, mine = agreed(lambda: secrets.token_hex(8)), jax.process_index()
    probe = directory / f".jaxrel-{token}.{mine}"
    # A disk that cannot be written is a disk of its own, whose saves will fail and be told.
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
    from_everyone(None)  # all have left their mark
    seen = [int(p.name.rpartition(".")[2]) for p in directory.glob(f".jaxrel-{token}.*")]
    hosts = from_everyone(min([mine, *seen]))
    with contextlib.suppress(OSError):
        probe.unlink()
    return hosts


def _on_host(arrays: Mapping[str, jax.Array], kept: list[Kept]) -> dict[int, np.ndarray]:
    """Copies of the blocks, which the devices may overwrite from now on."""
    shards: dict[str, dict[Any, jax.Array]] = {}
    for path in {k.path for k in kept}:
        shards[path] = {shard.device: shard.data for shard in arrays[path].addressable_shards}
    for k in kept:
        shards[k.path][k.device].copy_to_host_async()
    return {k.number: np.array(shards[k.path][k.device], copy=True) for k in kept}


def _shards(spec: jax.ShapeDtypeStruct) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Start and stop of the blocks that this process's devices hold of a leaf."""
    indices = spec.sharding.addressable_devices_indices_map(spec.shape).values()
    return sorted({bounds(index, spec.shape) for index in indices})


def _shape(start: tuple[int, ...], stop: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(start, stop, strict=True))


def _mask(numbers: frozenset[int]) -> str:
    """The numbers as the bits of one, in hexadecimal: short, where there are thousands."""
    return f"{sum(1 << number for number in numbers):x}"


def _from_first(value: Any) -> Any:
    """The value of the first process that has one. Collective."""
    first = from_everyone(value is not None).index(True)
    return from_everyone(value if jax.process_index() == first else None)[first]
