"""The peak of one JAX device, or unknown."""

import pytest

from jaxrel.exit_codes import UsageError
from jaxrel.plan import peaks

pytestmark = pytest.mark.core

# bfloat16 (float16 where there is none) of one JAX device, from the makers' sheets; of TPU v2, v3,
# TPU7x and TPU8i a device is one of two cores (jax/_src/tpu_info.py has them core by core).
BFLOAT16 = {
    "TPU v2": 23e12, "TPU v3": 70e12, "TPU v4": 275e12, "TPU v4 lite": 137e12,
    "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12,
    "TPU v6 lite": 918e12, "TPU v6e": 918e12, "TPU7x": 1153.5e12, "TPU7": 1153.5e12,
    "TPU8i": 550.5e12, "TPU8t": 996.1e12,
    "NVIDIA A10": 125e12, "NVIDIA A10G": 70e12, "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.5e12, "NVIDIA H100 PCIe": 756.5e12, "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989.5e12, "NVIDIA H20": 148e12, "NVIDIA B200": 2250e12, "NVIDIA GB200": 2500e12,
    "NVIDIA GB300": 2500e12, "NVIDIA L4": 121e12, "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165.2e12, "AMD Instinct MI250X": 191.5e12,
    "AMD Instinct MI300X": 1307.4e12, "AMD Instinct MI325X": 1307.4e12,
    "AMD Instinct MI355X": 2500e12,
}  # fmt: skip
FLOAT16_ALONE = {
    "Tesla V100-SXM2-16GB": 125e12, "Tesla V100-SXM2-32GB": 125e12, "Tesla T4": 65e12,
}  # fmt: skip


@pytest.mark.parametrize("kind", BFLOAT16)
def test_bfloat16(kind: str) -> None:
    found = peaks.peak(kind)
    assert found.flops == BFLOAT16[kind]
    assert "bfloat16" in found.source
    half = peaks.peak(kind, "float16").flops
    assert half == (None if kind.startswith("TPU") else BFLOAT16[kind])


@pytest.mark.parametrize("kind", FLOAT16_ALONE)
def test_no_bfloat16(kind: str) -> None:
    assert peaks.peak(kind).flops is None
    assert peaks.peak(kind, "float16").flops == FLOAT16_ALONE[kind]


def test_every_row_is_tested_and_has_a_source() -> None:
    known = {peaks._key(kind) for kind in (*BFLOAT16, *FLOAT16_ALONE)}
    assert set(peaks._table()) == known
    assert all(len(row["source"]) > 10 for row in peaks._table().values())


@pytest.mark.parametrize(
    ("kind", "dtype", "flops", "said"),
    [
        ("NVIDIA H100 80GB HBM3", "float8_e4m3fn", 1979e12, "float8_e4m3fn"),
        ("NVIDIA H100 80GB HBM3", "float8_e5m2", 1979e12, "float8_e5m2"),
        ("NVIDIA H100 80GB HBM3", "float32", 494.5e12, "float32 (TensorFloat-32, JAX's default"),
        ("NVIDIA H100 80GB HBM3", "tensorfloat32", 494.5e12, "tensorfloat32"),
        ("NVIDIA A100-SXM4-40GB", "float8_e5m2", None, "unknown: no peak of A100 40GB SXM"),
        ("Tesla V100-SXM2-16GB", "float32", 15.7e12, "float32 (vector units)"),
        ("AMD Instinct MI300X", "float32", 163.4e12, "float32 (vector units)"),
        ("TPU7x", "float8_e4m3fn", 2307e12, "a JAX device is 1 of 2 cores of a chip"),
        ("TPU v3", "float32", 70e12, "float32 (one bfloat16 pass, JAX's default"),
        ("TPU v5p", "float8_e5m2", None, "unknown: no peak of TPU v5p in 'float8_e5m2'"),
        ("TPU v4", "float64", None, "unknown: no peak of TPU v4 in 'float64'"),
        ("NVIDIA H200", "source", None, "unknown: no peak of H200 in 'source'"),
    ],
)
def test_dtypes(kind: str, dtype: str, flops: float | None, said: str) -> None:
    found = peaks.peak(kind, dtype)
    assert found.flops == flops
    assert said in found.source


def test_older_drivers_leave_the_maker_out() -> None:
    assert peaks.peak("A100-SXM4-40GB") == peaks.peak("NVIDIA A100-SXM4-40GB")


@pytest.mark.parametrize(
    "kind",
    ["cpu", "", "TPU", "TPU v9", "NVIDIA H100", "NVIDIA A100", "NVIDIA H200 NVL",
     "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA",
     "NVIDIA H100 80GB HBM2e", "NVIDIA A10-24Q", "NVIDIA GH200 480GB", "AMD Instinct MI300A"],
)  # fmt: skip
def test_what_is_merely_alike_is_unknown(kind: str) -> None:
    found = peaks.peak(kind)
    assert found.flops is None
    assert found.source == f"unknown: no device kind {kind!r} in the table"


def test_a_peak_of_the_users_own() -> None:
    assert peaks.given(989e12) == peaks.Peak(989e12, "given by the user")
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="^peak_flops: got .*: expected FLOP/s of one device"):
            peaks.given(wrong)
