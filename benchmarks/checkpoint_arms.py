"""The two ways to checkpoint that are compared, the state they save, and what one save costs."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrel.checkpoint import Checkpointer, leaves, restoring

DEVICES = 8
BYTES_PER_PARAMETER = 10
"""bfloat16 parameters, two float32 moments."""
_HIDDEN, _QUICK_HIDDEN = 1024, 64
_STEP = 1
READBACK_S = 2.0
"""Longest that steps are timed while a checkpoint is read back."""

PLAIN, AGAIN, UNCOMPRESSED = "plain", "plain again", "plain, uncompressed"
OURS, GIVEN = "jaxrel", "jaxrel, words given"
UNVERIFIED, UNREAD = "jaxrel, not verified", "jaxrel, no read-back"
NO_SAVE = "no save"


@dataclass(frozen=True)
class Size:
    """A transformer's weights: `layers` of 16 x hidden^2, and an embedding of 4 x hidden^2."""

    hidden: int
    layers: int

    @classmethod
    def of(cls, gigabytes: float, quick: bool) -> "Size":
        """The smallest with at least so many bytes; with `quick`, a few megabytes instead."""
        if quick:
            return cls(_QUICK_HIDDEN, 2)
        layer = 16 * _HIDDEN**2 * BYTES_PER_PARAMETER
        return cls(_HIDDEN, max(1, -(-int(gigabytes * 1e9 - layer / 4) // layer)))


def make_state(size: Size) -> dict[str, Any]:
    """Parameters and moments on a mesh of 8: matrices sharded, norms replicated.

    The values are of a hash, as hard to compress as weights are.
    """
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("fsdp",))
    shapes: dict[str, tuple[int, ...]] = {"embedding": (4 * size.hidden, size.hidden)}
    for layer in range(size.layers):
        for name in "qkvo":
            shapes[f"layer{layer}/{name}"] = (size.hidden, size.hidden)
        for name in ("gate", "up", "down"):
            shapes[f"layer{layer}/{name}"] = (size.hidden, 4 * size.hidden)
        shapes[f"layer{layer}/norm"] = (size.hidden,)
    state: dict[str, Any] = {}
    for part, dtype in (("params", jnp.bfloat16), ("mu", jnp.float32), ("nu", jnp.float32)):
        state[part] = {}
        for name, shape in shapes.items():
            sharding = NamedSharding(mesh, P("fsdp") if len(shape) > 1 else P())
            make = jax.jit(_hashed, static_argnums=(1, 2), out_shardings=sharding)
            seed = sum(map(ord, part + name))
            state[part][name] = make(seed, shape, dtype)
    return jax.block_until_ready(state)


def _hashed(seed: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    bits = jax.lax.iota(jnp.uint32, int(np.prod(shape))) + jnp.uint32(seed) * jnp.uint32(7919)
    for shift, factor in ((15, 0x9E3779B1), (13, 0x85EBCA77)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    unit = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    return ((unit - 1.5) * 0.05).astype(dtype).reshape(shape)


def abstract(state: Any) -> Any:
    """What a restore is asked for: the same shapes, dtypes and shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


class Way(Protocol):
    """A way to checkpoint, opened on a folder of its own."""

    def save(self, state: Any) -> None: ...
    def flying(self) -> bool: ...
    def wait(self) -> None: ...
    def restore(self, wanted: Any) -> Any: ...
    def reading(self) -> bool: ...
    def close(self) -> None: ...


class Plain:
    """Orbax's own manager with its defaults: asynchronous, nothing verified."""

    def __init__(self, folder: Path, arm: str) -> None:
        if arm == UNCOMPRESSED:
            handler = ocp.PyTreeCheckpointHandler(use_compression=False)
            self.manager = ocp.CheckpointManager(folder, item_handlers=handler)
            self._save, self._restore = ocp.args.PyTreeSave, _pytree_restore
        else:
            self.manager = ocp.CheckpointManager(folder)
            self._save, self._restore = ocp.args.StandardSave, ocp.args.StandardRestore

    def save(self, state: Any) -> None:
        self.manager.save(_STEP, args=self._save(state))

    def flying(self) -> bool:
        return self.manager.is_saving_in_progress()

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def restore(self, wanted: Any) -> Any:
        return self.manager.restore(_STEP, args=self._restore(wanted))

    def reading(self) -> bool:
        return False

    def close(self) -> None:
        self.manager.close()


def _pytree_restore(wanted: Any) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(
        item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted)
    )


class Ours:
    """jaxrel's Checkpointer; an ablation takes one part out of it."""

    def __init__(self, folder: Path, arm: str, words: Any = None) -> None:
        self.checkpointer = (
            Checkpointer(folder, verify_mb_s=0.0) if arm == UNREAD else Checkpointer(folder)
        )
        self._words, self._verified = words, arm != UNVERIFIED

    def save(self, state: Any) -> None:
        self.checkpointer.save(_STEP, state, words=self._words)

    def flying(self) -> bool:
        self.checkpointer.check()
        return not self.checkpointer.landed()

    def wait(self) -> None:
        self.checkpointer.wait()

    def restore(self, wanted: Any) -> Any:
        proof = restoring._verify
        if not self._verified:
            restoring._verify = lambda *_: None
        try:
            return self.checkpointer.restore(wanted)[0]
        finally:
            restoring._verify = proof

    def reading(self) -> bool:
        thread = self.checkpointer._keeper._reading
        return thread is not None and thread.is_alive()

    def close(self) -> None:
        self.checkpointer._keeper.close()  # the next arm must not wait for a reading
        self.checkpointer.close()


@contextmanager
def opened(folder: Path, arm: str, state: Any = None) -> Iterator[Way]:
    """The way of an arm; the words of `state` are computed beforehand where the arm gives them."""
    if arm.startswith("plain"):
        way: Way = Plain(folder, arm)
    else:
        way = Ours(folder, arm, leaves.words(state) if arm == GIVEN else None)
    try:
        yield way
    finally:
        way.close()


@dataclass(frozen=True)
class Used:
    """What this process has used so far, all threads together."""

    s: float
    cpu_s: float
    written: int
    """Bytes given to `write`, whatever the page cache does with them."""
    read: int
    """Bytes taken by `read`, out of the page cache or not."""

    @classmethod
    def now(cls) -> "Used":
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        written, read = int(fields["wchar"]), int(fields["rchar"])
        return cls(time.perf_counter(), time.process_time(), written, read)

    def since(self, before: "Used", prefix: str = "") -> dict[str, float]:
        """The difference, by name."""
        return {f"{prefix}{k}": v - getattr(before, k) for k, v in vars(self).items()}


def save(folder: Path, arm: str, state: Any) -> dict[str, float]:
    """One save: what `save` blocked for, what it took until the commit, what lies on disk.

    Nothing is read back meanwhile: that starts after the commit.
    """
    with opened(folder, arm, state) as way:
        began = Used.now()
        way.save(state)
        blocked = Used.now().since(began, "blocking_")
        way.wait()
        whole = Used.now().since(began, "commit_")
    return blocked | whole | {"disk_bytes": disk_bytes(folder)}


def restore(folder: Path, arm: str, wanted: Any) -> dict[str, float]:
    """One restore of what is in `folder`, straight into the shardings of `wanted`."""
    with opened(folder, arm) as way:
        began = Used.now()
        jax.block_until_ready(way.restore(wanted))
        return Used.now().since(began, "restore_")


def make_step(quick: bool) -> Any:
    """A jitted step on all devices, some 20 ms of matrix products, and what it works on."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("fsdp",))
    side, times = (32, 2) if quick else (192, 8)
    x = jax.device_put(jnp.ones((DEVICES, side, side)), NamedSharding(mesh, P("fsdp")))

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, y: jnp.tanh(y @ y * (1.0 / side)), x)

    jax.block_until_ready(step(x))
    return lambda: jax.block_until_ready(step(x))


def steps_during(folder: Path, arm: str, state: Any, step: Any, idle_s: float) -> dict[str, float]:
    """Mean time of the steps that run between the return of `save` and the commit.

    And `readback_step_s`, of those while the checkpoint is read back, for at most READBACK_S.
    For the arm `no save`, the mean of `idle_s` seconds of steps.
    """
    if arm == NO_SAVE:
        ends = time.perf_counter() + idle_s
        return _steps(step, lambda: time.perf_counter() < ends, "")
    with opened(folder, arm, state) as way:
        began = Used.now()
        way.save(state)
        blocked = Used.now().since(began, "blocking_")
        found = blocked | _steps(step, way.flying, "")
        if way.reading():
            ends = time.perf_counter() + READBACK_S
            going = lambda: way.reading() and time.perf_counter() < ends  # noqa: E731
            found |= _steps(step, going, "readback_")
    return found


def _steps(step: Any, going: Any, prefix: str) -> dict[str, float]:
    count, began, cpu = 0, time.perf_counter(), time.process_time()
    while True:
        step()
        count += 1
        if not going():
            break
    took = time.perf_counter() - began
    used = time.process_time() - cpu
    return {f"{prefix}step_s": took / count, f"{prefix}step_cpu_s": used / count,
            f"{prefix}steps": count}  # fmt: skip


def disk_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def disk_speed(folder: Path, count: int) -> dict[str, float]:
    """Bytes a second of a plain file of `count` bytes: written and synced, read cold and warm.

    Cold is after the kernel was advised to forget the file's pages, which it may not heed.
    """
    path, block = folder / "plain-file", os.urandom(1 << 24)
    with path.open("wb", buffering=0) as file:
        began = time.perf_counter()
        for left in range(count, 0, -len(block)):
            file.write(block[:left])
        os.fsync(file.fileno())
        found = {"write_bytes_per_s": count / (time.perf_counter() - began)}
    buffer = bytearray(1 << 24)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for name in ("cold", "warm"):
            file.seek(0)
            began = time.perf_counter()
            while file.readinto(buffer):
                pass
            found[f"read_{name}_bytes_per_s"] = count / (time.perf_counter() - began)
    path.unlink()
    return found
