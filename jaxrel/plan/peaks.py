"""Peak FLOP/s of accelerators, for dense matrix products, by what JAX calls the device.

The table is `peaks.csv`: FLOP/s of one chip by format, and how many JAX devices a chip is. Only
names that stand in it are known: variants of a product differ by a third (H100 SXM and PCIe), so a
name that is merely alike is unknown.
"""

import csv
import functools
import math
from dataclasses import dataclass
from importlib import resources

from jaxrel.config import show
from jaxrel.exit_codes import UsageError

_FLOAT32 = {
    "bfloat16": "one bfloat16 pass, JAX's default matmul precision",
    "tensorfloat32": "TensorFloat-32, JAX's default matmul precision",
    "vector": "vector units",
}
"""What a float32 matrix product runs in; a table's `float32_runs_in` says which."""


@dataclass(frozen=True)
class Peak:
    """A peak and where it comes from; one of these two is of no use without the other."""

    flops: float | None
    """FLOP/s of one JAX device; None when unknown."""
    source: str
    """Where the number comes from, or why there is none."""


def given(flops: float) -> Peak:
    """The user's own peak, in FLOP/s of one JAX device. Raises UsageError."""
    if not 0 < flops < math.inf:
        raise UsageError(f"peak_flops: got {flops:g}: expected FLOP/s of one device, as 989e12")
    return Peak(float(flops), "given by the user")


def peak(device_kind: str, dtype: str = "bfloat16") -> Peak:
    """The peak of one JAX device of `device_kind` (as `jax.Device` has it) in a JAX dtype.

    dtypes: bfloat16, float16, float8_*, float32, and tensorfloat32 for that precision. float32 is
    the peak of what JAX uses for it by default. Whatever is not in the table has `flops` None: it
    is for the caller to say so, once.
    """
    row = _table().get(_key(device_kind))
    if row is None:
        return Peak(None, f"unknown: no device kind {show(device_kind)} in the table")
    column = "float8" if dtype.startswith("float8_") else dtype
    runs_in = ""
    if dtype == "float32":
        column = row["float32_runs_in"]
        runs_in = f" ({_FLOAT32[column]})"
    elif column not in ("bfloat16", "float16", "float8", "tensorfloat32"):
        column = ""
    value = row.get(column)
    if not value:
        return Peak(None, f"unknown: no peak of {row['name']} in {show(dtype)} in the table")
    devices = int(row["devices"])
    shared = f", a JAX device is 1 of {devices} cores of a chip" if devices > 1 else ""
    return Peak(float(value) / devices, f"{row['name']}, {dtype}{runs_in}{shared}: {row['source']}")


def _key(kind: str) -> str:
    """Older drivers leave the maker's name out."""
    return " ".join(kind.split()).casefold().removeprefix("nvidia ")


@functools.cache
def _table() -> dict[str, dict[str, str]]:
    """The rows by each of their device kinds."""
    text = resources.files("jaxrel.plan").joinpath("peaks.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return {_key(kind): row for row in rows for kind in row["device_kinds"].split("|")}
