"""The peak of the devices at hand: known, given or measured, and never guessed."""

import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import pytest

from jaxrel.exit_codes import UsageError
from jaxrel.plan.peaks import Peak
from jaxrel.throughput import peak
from jaxrel.throughput.peak import device_peak, measured_peak

pytestmark = pytest.mark.core


class Machine:
    """A clock, and products that take it the time that their edge says."""

    def __init__(self, seconds: Callable[[int], Iterator[float]]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.tried: dict[int, int] = {}
        self.devices = 0

    def make(self, dtype: str, mesh: Any, edge: int) -> Callable[[], object]:
        taken, self.devices = self.seconds(edge), mesh.size

        def run() -> None:
            self.tried[edge] = self.tried.get(edge, 0) + 1
            self.now += next(taken)

        return run

    def peak(self, **more: Any) -> Peak:
        return measured_peak("float32", make=self.make, clock=lambda: self.now, **more)


def at_rate(flops: dict[int, float]) -> Callable[[int], Iterator[float]]:
    """Each product at the rate of its edge; those in between are three times slower."""

    def seconds(edge: int) -> Iterator[float]:
        for n in range(99):
            yield 2 * edge**3 / flops[edge] * (1 if n % 4 == 2 else 3)

    return seconds


def test_the_best_run_of_the_fastest_size_counts() -> None:
    machine = Machine(at_rate({256: 1e12, 512: 4e12, 1024: 6e12, 2048: 5.9e12, 4096: 5.8e12}))
    found = machine.peak()
    assert found.flops == pytest.approx(6e12)
    words = "1024x1024x1024 float32 matmul on 8 cpu devices at once, best of 9"
    assert found.source == f"measured: {words}"
    assert machine.devices == 8
    assert list(machine.tried) == [256, 512, 1024, 2048, 4096]  # two in a row are slower


def test_one_size_that_is_slow_by_chance_ends_nothing() -> None:
    machine = Machine(
        at_rate({256: 1e12, 512: 0.5e12, 1024: 6e12, 2048: 7e12, 4096: 1e12, 8192: 1e12})
    )
    assert machine.peak(budget_s=1e6).flops == pytest.approx(7e12)


def test_the_largest_size_is_the_last() -> None:
    machine = Machine(at_rate({edge: 1e15 * edge for edge in peak.SIZES}))
    assert machine.peak(budget_s=10.0).flops == pytest.approx(1e15 * peak.SIZES[-1])


def test_a_slow_machine_is_given_up_on_in_time() -> None:
    # At 2 GFLOP/s the third size would take 3 x 1.1 s at least.
    machine = Machine(at_rate(dict.fromkeys(peak.SIZES, 2e9)))
    found = machine.peak(budget_s=1.0)
    assert found.flops == pytest.approx(2e9) and "256x256x256" in found.source
    assert list(machine.tried) == [256, 512]
    assert machine.now < 1.2


def test_what_does_not_fit_ends_the_search() -> None:
    machine = Machine(at_rate(dict.fromkeys(peak.SIZES, 1e12)))
    first = machine.make

    def make(dtype: str, mesh: Any, edge: int) -> Callable[[], object]:
        if edge > 256:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
        return first(dtype, mesh, edge)

    found = measured_peak("float32", make=make, clock=lambda: machine.now)
    assert found.flops == pytest.approx(1e12)

    def never(dtype: str, mesh: Any, edge: int) -> Callable[[], object]:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such product\nmore")

    why = "256x256x256 bfloat16 matmul: UNIMPLEMENTED: no such product"
    assert measured_peak("bfloat16", make=never) == Peak(None, f"unknown: {why}")


@pytest.mark.parametrize(
    ("dtype", "right"),
    [
        ("int8", "expected a floating-point dtype of JAX, such as bfloat16"),
        ("complex64", "expected a floating-point dtype of JAX, such as bfloat16"),
        ("tensorfloat32", "expected a floating-point dtype of JAX, such as bfloat16"),
        ("float64", "JAX has it only with jax_enable_x64"),
    ],
)
def test_a_dtype_without_such_a_product_is_refused(dtype: str, right: str) -> None:
    with pytest.raises(UsageError, match=f"^dtype: got '{dtype}': {right}$"):
        measured_peak(dtype)


def test_an_unknown_device_has_no_peak_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peak._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = [device_peak(dtype) for dtype in ("float32", "bfloat16", "float32")]
    assert set(found) == {Peak(None, "unknown: no device kind 'cpu' in the table")}
    (record,) = caplog.records
    assert "'cpu'" in record.getMessage()
    assert "give the peak FLOP/s of a device, or measured" in record.getMessage()


class Device:
    """As much of a `jax.Device` as the table needs."""

    device_kind = "NVIDIA H100 80GB HBM3"


def test_a_known_device_has_the_peak_of_the_table(caplog: pytest.LogCaptureFixture) -> None:
    devices = cast(Any, [Device()])
    assert device_peak("bfloat16", devices=devices).flops == 989.5e12  # NVIDIA's sheet: 989.5
    assert device_peak("float32", devices=devices).flops == 494.5e12  # TensorFloat-32
    assert not caplog.records


def test_a_given_peak_wins() -> None:
    assert device_peak("bfloat16", 5e12) == Peak(5e12, "given by the user")
    with pytest.raises(UsageError, match="^peak_flops: got -1: expected FLOP/s of one device"):
        device_peak("bfloat16", -1.0)
    with pytest.raises(UsageError, match="^peak_flops: got 'table': expected FLOP/s, or measured"):
        device_peak("bfloat16", cast(Any, "table"))


@pytest.mark.parametrize("count", [1, 8])
def test_a_measured_peak_says_of_what_it_is(count: int) -> None:
    """How high it is depends on what else the machine does: benchmarks/mfu.py shows it."""
    found = device_peak("float32", "measured", jax.devices()[:count])
    assert found.flops is not None and 1e7 < found.flops < 1e15
    assert found.source.startswith("measured: ")
    assert f" float32 matmul on {count} cpu device" in found.source


def test_an_ambient_mesh_of_other_devices_changes_nothing() -> None:
    ambient = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[4:])
    with jax.set_mesh(ambient):
        assert measured_peak("float32", jax.devices()[:2], budget_s=0.01).flops
