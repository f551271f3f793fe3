"""Each of four injected faults moves its own row of the waterfall, and no other, by its time.

Simulated devices train a small network; the times are those of the machine that runs this.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxrel.config import BatchConfig, Config, DataConfig, MeshConfig
from jaxrel.habits.diagnose import Diagnose, measure
from jaxrel.habits.diagnose_document import document
from jaxrel.habits.diagnose_measure import fixed_work
from jaxrel.plan import waterfall as rows
from jaxrel.train.task import Task
from tests.train import toys

pytestmark = pytest.mark.slow

SLEEP_S = 0.2
SLOW_DEVICE = 1
TURNS = 150
ROOT = Path(__file__).parents[2]
HERE = "tests.habits.test_diagnose_faults"

LossFn = Callable[[Any, Any, jax.Array], Any]


def batches(
    *, shard: int, num_shards: int, rows: int, sequence: int, seed: int, sleep_s: float = 0.0
) -> grain.MapDataset:
    """Batches for the toy network."""

    def make(position: int) -> dict[str, np.ndarray]:
        if shard == 0:
            time.sleep(sleep_s)
        batch = toys.points(position * num_shards + shard)
        return {name: x[:rows] for name, x in batch.items()}

    return grain.MapDataset.range(1_000_000).map(make)


def slow_batches(**asked: Any) -> grain.MapDataset:
    """The same, each of which takes a while to fetch."""
    return batches(**asked, sleep_s=SLEEP_S)


def task(change: Callable[[LossFn], LossFn], _: Config) -> Task:
    init_fn, loss_fn = toys.mlp(hook=False)
    return Task(init_fn, change(loss_fn), optax.adamw(1e-3))


def as_it_is(loss_fn: LossFn) -> LossFn:
    return loss_fn


def with_callback(loss_fn: LossFn) -> LossFn:
    """The host sleeps in every step: once on every device, at the same time."""

    def sleep(x: Any) -> Any:
        time.sleep(SLEEP_S)
        return np.asarray(x)

    def changed(params: Any, batch: Any, rng: jax.Array) -> Any:
        x = lax.stop_gradient(batch["x"])
        first = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), x.dtype), x[0, 0])
        return loss_fn(params, batch | {"x": batch["x"].at[0, 0].set(first)}, rng)

    return changed


def with_tiny_products(loss_fn: LossFn) -> LossFn:
    """Thousands of products of 8 x 8, one after the other."""

    def changed(params: Any, batch: Any, rng: jax.Array) -> Any:
        x = lax.stop_gradient(batch["x"])
        square = jnp.tile(jnp.tanh(x[:1, :8]), (8, 1)) / 8
        found = lax.fori_loop(0, 12000, lambda _, y: y @ square, jnp.eye(8))
        return loss_fn(params, batch | {"x": batch["x"].at[0, 0].add(1e-30 * found[0, 0])}, rng)

    return changed


def with_work(loss_fn: LossFn, *, slow: bool) -> LossFn:
    """Elementwise work without products, three times as much of it on one device."""

    def changed(params: Any, batch: Any, rng: jax.Array) -> Any:
        x = jnp.tile(lax.stop_gradient(batch["x"][0]), 2048)

        def turns(n: int) -> Callable[[Any], Any]:
            return lambda x: lax.fori_loop(0, n, lambda _, y: jnp.sin(y) + 0.1, x)

        here = (lax.axis_index("data") == SLOW_DEVICE) & slow
        y = lax.cond(here, turns(3 * TURNS), turns(TURNS), x)
        return loss_fn(params, batch | {"x": batch["x"].at[0, 0].add(1e-30 * y[0])}, rng)

    return changed


def slow_work(device: Any) -> Callable[[], object]:
    """The fixed computation, three times on one device."""
    once = fixed_work(device)
    return (lambda: [once() for _ in range(3)]) if device.id == SLOW_DEVICE else once


def diagnosed(
    change: Callable[[LossFn], LossFn] = as_it_is,
    pipeline: str = "batches",
    work: Any = None,
    cpu_devices: int | None = None,
) -> dict[str, Any]:
    config = Config(
        mesh=MeshConfig(cpu_devices=cpu_devices),
        batch=BatchConfig(global_size=toys.ROWS, sequence=1, groups=toys.GROUPS),
        data=DataConfig(pipeline=f"{HERE}:{pipeline}"),
    )
    return document(measure(config, Diagnose(seconds=6.0), partial(task, change), work))


@cache
def healthy() -> dict[str, Any]:
    return diagnosed()


def ms(document: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: 1e3 * row["seconds"] for row in document["waterfall"]}


def moved_alone(name: str, fault: dict[str, Any], by: float, within: float = 0.15) -> None:
    """The row `name` moved by the milliseconds `by`, and no other by half of that.

    A sleep takes its time on any machine; what computes is slower beside other work.
    """
    moved = {row: value - ms(healthy())[row] for row, value in ms(fault).items()}
    told = (by, ms(healthy()), ms(fault), fault["notes"])
    assert moved.pop(name) == pytest.approx(by, rel=within), told
    assert max(map(abs, moved.values())) < by / 2, told
    assert sum(row["share"] for row in fault["waterfall"]) == pytest.approx(1, abs=1e-9)


def test_a_fetch_that_sleeps_is_data_loading() -> None:
    fault = diagnosed(pipeline="slow_batches")
    moved_alone(rows.DATA, fault, 1e3 * SLEEP_S)
    assert fault["mfu"] < healthy()["mfu"] / 10
    assert fault["verdict"].startswith("largest loss: data loading, ")


def test_a_callback_that_sleeps_is_a_host_callback() -> None:
    fault = diagnosed(with_callback)
    moved_alone(rows.CALLBACKS, fault, 1e3 * SLEEP_S)
    assert fault["mfu"] < healthy()["mfu"] / 10
    assert fault["verdict"].startswith("largest loss: host callbacks, ")


def test_many_tiny_products_are_small_kernels() -> None:
    fault = diagnosed(with_tiny_products)
    by = 1e3 * (fault["step_s"] - healthy()["step_s"])
    moved_alone(rows.KERNELS, fault, by, within=0.35)
    assert fault["verdict"].startswith("largest loss: small kernels, ")
    assert fault["products"][0]["shapes"] == "f32[8, 8] x f32[8, 8]"


PAIR = f"""
import json
from {HERE} import diagnosed, fixed_work, partial, slow_work, with_work
base = diagnosed(partial(with_work, slow=False), work=fixed_work, cpu_devices=2)
print(json.dumps([base, diagnosed(partial(with_work, slow=True), work=slow_work)]))
"""


def test_a_device_with_three_times_the_work_is_named() -> None:
    # In a process of its own, of two devices, which have a core each.
    done = subprocess.run(
        [sys.executable, "-c", PAIR], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    base, fault = json.loads(done.stdout)
    assert ms(base)[rows.STRAGGLERS] < 0.2 * ms(base)[rows.COMPUTATION], base["notes"]
    # Twice what every device has to do, which its share takes alone.
    told = (ms(base), ms(fault), fault["notes"])
    assert ms(fault)[rows.STRAGGLERS] == pytest.approx(2e3 * fault["one_device_s"], rel=0.35), told
    others = {name: value for name, value in ms(fault).items() if name != rows.STRAGGLERS}
    assert max(others.values()) < 2 * ms(fault)[rows.STRAGGLERS], told
    assert fault["straggler"]["device"] == f"CPU:{SLOW_DEVICE}"
    assert f"; CPU:{SLOW_DEVICE} " in fault["verdict"]
