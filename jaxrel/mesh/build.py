"""Parallelism degrees to a device mesh."""

from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrel.config import MeshConfig
from jaxrel.exit_codes import UsageError

BATCH_AXES = ("data", "fsdp")
"""The axes over which the global batch is divided, outermost first."""


def degrees(config: MeshConfig) -> dict[str, int]:
    """Every named axis and its degree as configured, in mesh order; -1 is not yet resolved."""
    named = {"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor}
    return named | dict(config.axes)


def resolve(wanted: Mapping[str, int], devices: int) -> dict[str, int]:
    """Degrees whose product is `devices`; the one that is -1 takes what is left.

    Raises UsageError naming the degrees when they do not multiply to `devices`.
    """
    free = [name for name, degree in wanted.items() if degree == -1]
    fixed = prod(degree for degree in wanted.values() if degree != -1)
    text = " x ".join(f"{name} {degree}" for name, degree in wanted.items())
    if len(free) > 1:
        raise UsageError(f"mesh.{free[1]}: got -1: only one degree may be -1, and {free[0]} is")
    if free and fixed > 0 and devices % fixed == 0:
        return {name: devices // fixed if name in free else d for name, d in wanted.items()}
    if free or fixed != devices:
        names = ", ".join(f"mesh.{name}" for name in wanted)
        raise UsageError(
            f"{names}: got {text}: the degrees must multiply to the {devices} devices there are"
        )
    return dict(wanted)


def refit(wanted: Mapping[str, int], devices: int) -> dict[str, int]:
    """Degrees for the `devices` that an attempt has; `wanted` if they fit already.

    data and fsdp change, all other axes stay: fsdp keeps as much of its degree as divides
    what is left for the two, data takes the rest. Raises UsageError when the other axes
    alone do not divide `devices`.
    """
    try:
        return resolve(wanted, devices)
    except UsageError:
        rest = prod(d for name, d in wanted.items() if name not in BATCH_AXES)
        if rest < 1 or devices % rest:
            raise
        batch = devices // rest
        fsdp = gcd(batch, max(1, wanted["fsdp"]))
        return {**wanted, "data": batch // fsdp, "fsdp": fsdp}


def build_mesh(wanted: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices` (default: all of the job's) with the axes of `wanted`.

    Devices of one process are neighbours on the innermost axes, so that fsdp and tensor
    traffic stays inside a host whenever the degrees allow it.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = resolve(wanted, len(devices))
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
