"""Steps that ran: eight simulated CPU devices under the JAX profiler."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrel.throughput.device_split import DeviceSplit
from jaxrel.throughput.profile_step import Sampler, profiled

pytestmark = pytest.mark.core

DEVICES = 8


class Step:
    """A compiled program over all devices: x [8 * rows, 256] by rows, w [256, 256] everywhere."""

    def __init__(self, body: Callable[[Any, Any], Any], rows: int = 256) -> None:
        mesh = jax.make_mesh((DEVICES,), ("d",))
        shapes = ((DEVICES * rows, 256), P("d")), ((256, 256), P())
        self.args = [jax.device_put(jnp.ones(s), NamedSharding(mesh, p)) for s, p in shapes]
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=False
        )
        self.compiled = jax.jit(mapped).lower(*self.args).compile()
        self.text = self.compiled.as_text() or ""

    def __call__(self) -> Any:
        return self.compiled(*self.args)

    def run(self) -> None:
        jax.block_until_ready(self())


def matmuls(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=8)[0]


def sums(x: Any, w: Any) -> Any:
    for _ in range(4):
        x = jax.lax.psum(x, "d") * 0.125
    return x


def asking(host: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def body(x: Any, w: Any) -> Any:
        result = jax.ShapeDtypeStruct((), jnp.float32)
        return x + jax.pure_callback(host, result, x[0, 0])

    return body


def sleep(value: Any) -> Any:
    time.sleep(0.2)
    return np.asarray(value)


def split_of(step: Step, *, with_text: bool) -> DeviceSplit:
    step.run()
    found = profiled(step.run, [step.text] if with_text else [])
    assert isinstance(found, DeviceSplit), found
    assert list(found.devices) == [f"CPU:{n}" for n in range(DEVICES)]
    for parts in found.devices.values():
        assert (
            parts.step_ns
            == round(found.step_s * 1e9)
            == (
                parts.compute_ns
                + parts.exposed_communication_ns
                + parts.callback_ns
                + parts.other_ns
                + parts.idle_ns
            )
        )
    return found


@pytest.mark.parametrize("with_text", [True, False])
def test_matmuls_communicate_nothing(with_text: bool) -> None:
    found = split_of(Step(matmuls), with_text=with_text)
    assert found.compute_s > 0
    assert found.exposed_communication_s == found.overlapped_communication_s == 0
    assert found.callback_s == 0
    assert found.source == "cpu"


@pytest.mark.parametrize("with_text", [True, False])
def test_sums_over_devices_are_mostly_communication(with_text: bool) -> None:
    found = split_of(Step(sums, rows=2048), with_text=with_text)
    assert found.exposed_communication_s > found.compute_s > 0


def test_a_loop_of_sums_does_not_count_as_compute() -> None:
    def body(x: Any, w: Any) -> Any:
        return jax.lax.fori_loop(0, 4, lambda _, c: jax.lax.psum(c, "d") * 0.125, x)

    found = split_of(Step(body, rows=2048), with_text=True)
    assert found.exposed_communication_s > found.compute_s > 0


@pytest.mark.parametrize("with_text", [True, False])
def test_a_callback_that_sleeps_is_the_hosts_time(with_text: bool) -> None:
    found = split_of(Step(asking(sleep)), with_text=with_text)
    assert found.callback_s > 0.15
    assert found.callback_s > found.compute_s
    assert all(parts.callback_ns > 0.15e9 for parts in found.devices.values())


def test_sampling_waits_for_no_device() -> None:
    released = threading.Event()
    in_time: list[bool] = []

    def wait(value: Any) -> Any:
        in_time.append(released.wait(60))
        return np.asarray(value)

    step, sampler = Step(asking(wait)), Sampler()
    released.set()
    step.run()
    released.clear()
    in_time.clear()
    assert sampler.begin()
    result = step()
    sampler.mark()
    released.set()  # only now can the step end
    jax.block_until_ready(result)
    assert isinstance(sampler.end(), DeviceSplit)
    assert in_time == [True] * DEVICES


def test_the_step_counts_from_the_mark() -> None:
    slow, fast = Step(asking(sleep)), Step(matmuls)
    slow.run()
    fast.run()
    sampler = Sampler([slow.text, fast.text])
    sampler.begin()
    before = slow()
    sampled = fast()
    jax.block_until_ready(before)
    marked = time.perf_counter()
    sampler.mark()
    jax.block_until_ready(sampled)
    found = sampler.end()
    assert found is not None
    assert found.step_s <= time.perf_counter() - marked
    assert found.callback_s == 0  # the slow step's, before the mark


def test_a_program_of_one_device() -> None:
    x = jnp.ones((256, 256))
    compiled = jax.jit(lambda x: x @ x).lower(x).compile()
    found = profiled(lambda: jax.block_until_ready(compiled(x)))
    assert isinstance(found, DeviceSplit)
    assert list(found.devices) == ["CPU:0"]
    assert found.compute_s > 0
