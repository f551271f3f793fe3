"""The peak of the devices at hand: given, from the table, or measured.

A measured peak is what a large matrix product reaches here, so it lies below the maker's number,
and a utilisation against it is higher than one against the table. Its source says so.
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrel.config import show
from jaxrel.exit_codes import UsageError
from jaxrel.plan import peaks
from jaxrel.plan.peaks import Peak

log = logging.getLogger(__name__)

SIZES = tuple(2**n for n in range(8, 15))
"""Edges of the squares that are tried; the largest takes two arrays of 0.5 GB in bfloat16."""
_FEWEST, _MOST = 3, 9
"""Runs of each."""

Make = Callable[[str, Mesh, int], Callable[[], object]]
"""(dtype, mesh of one axis, edge) -> one matrix product on every device, waited for; warm."""


def device_peak(
    dtype: str,
    given: float | Literal["measured"] | None = None,
    devices: Sequence[Any] | None = None,
) -> Peak:
    """FLOP/s of one of `devices` (default: all of the job's) for dense matrix products in `dtype`.

    `given` is the user's own number, "measured" times one (`measured_peak`), None is the table by
    `device_kind`. What the table does not know has `flops` None; the first time, a warning says
    what to give. Raises UsageError.
    """
    if given == "measured":
        return measured_peak(dtype, devices)
    if isinstance(given, str):
        raise UsageError(f"peak_flops: got {show(given)}: expected FLOP/s, or measured")
    if given is not None:
        return peaks.given(given)
    found = peaks.peak((devices or jax.devices())[0].device_kind, dtype)
    if found.flops is None:
        _warn(found.source)
    return found


@functools.cache
def _warn(why: str) -> None:
    """Once a process."""
    log.warning("peak %s; give the peak FLOP/s of a device, or measured, to know MFU", why)


def measured_peak(
    dtype: str,
    devices: Sequence[Any] | None = None,
    *,
    make: Make | None = None,
    clock: Callable[[], float] = time.perf_counter,
    budget_s: float = 1.0,
) -> Peak:
    """What a square matrix product in `dtype`, at JAX's default precision, reaches on a device.

    All of `devices` (default: all local ones) run one at the same time, so that simulated CPU
    devices, which share the cores, get their share. Larger squares are tried while the rate, twice
    the cube of the edge over the best of several runs, rises and the next fits into `budget_s`
    seconds of runs; compilation is extra. The order of a second on a CPU.

    Each process measures its own devices and comes to a number of its own: a job must agree on
    one, that of process 0 or the highest, before it divides by it. `make` and `clock` are for
    tests. Raises UsageError for a dtype that has no such product. Has `flops` None when nothing
    could be run.
    """
    _check(dtype)
    here = jax.process_index()
    local = [d for d in devices or jax.local_devices() if d.process_index == here]
    mesh = Mesh(np.array(local), ("device",))
    best, words, spent, below = 0.0, "", 0.0, 0
    for edge in SIZES:
        try:
            with jax.set_mesh(mesh):  # an ambient mesh of other devices would be refused
                run = (make or _product)(dtype, mesh, edge)
                seconds = _time(run, clock, budget_s / 8)
        except jax.errors.JaxRuntimeError as error:  # out of memory, or no such product here
            words = words or f"{edge}x{edge}x{edge} {dtype} matmul: {str(error).splitlines()[0]}"
            break
        rate = 2 * edge**3 / min(seconds)
        below = below + 1 if rate <= best else 0
        if not below:
            best, words = rate, (
                f"{edge}x{edge}x{edge} {dtype} matmul on {len(local)} {local[0].device_kind}"
                f" device{'s at once' if len(local) > 1 else ''}, best of {len(seconds)}"
            )  # fmt: skip
        spent += sum(seconds)
        # On a machine with other work one size may be slow by chance: two in a row are not.
        if below == 2 or spent + 8 * _FEWEST * min(seconds) > budget_s:
            break
    return Peak(best, f"measured: {words}") if best else Peak(None, f"unknown: {words}")


def _check(dtype: str) -> None:
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or not jnp.issubdtype(kind, jnp.floating):
        raise UsageError(
            f"dtype: got {show(dtype)}: expected a floating-point dtype of JAX, such as bfloat16"
        )
    if jax.dtypes.canonicalize_dtype(kind) != kind:
        raise UsageError(f"dtype: got {show(dtype)}: JAX has it only with jax_enable_x64")


def _product(dtype: str, mesh: Mesh, edge: int) -> Callable[[], object]:
    """A square of random numbers on every device, multiplied by itself."""
    sharding = NamedSharding(mesh, P("device"))

    def numbers() -> jax.Array:
        shape = (mesh.size * edge, edge)
        return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16).astype(dtype)

    squared: Any = jax.shard_map(
        lambda x: x @ x, mesh=mesh, in_specs=P("device"), out_specs=P("device")
    )
    x = jax.jit(numbers, out_shardings=sharding)()
    multiply = jax.jit(squared)

    def run() -> object:
        return jax.block_until_ready(multiply(x))

    run()
    return run


def _time(run: Callable[[], object], clock: Callable[[], float], enough_s: float) -> list[float]:
    """Seconds of each run: a few at least, more while they are short."""
    seconds: list[float] = []
    while len(seconds) < _FEWEST or (len(seconds) < _MOST and sum(seconds) < enough_s):
        start = clock()
        run()
        seconds.append(clock() - start)
    return seconds
