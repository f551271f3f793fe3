"""The measurements of `jaxrel diagnose`: all of one configuration, in one process."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrel.config import Config
from jaxrel.data.pipeline import Feed
from jaxrel.exit_codes import FailedError
from jaxrel.habits.diagnose_products import Bench
from jaxrel.habits.diagnose_trace import Moments, moments, traced
from jaxrel.mesh.build import build_mesh
from jaxrel.mesh.layout import Layout
from jaxrel.throughput.op_kinds import Program
from jaxrel.train.run import make_step
from jaxrel.train.step import TrainStep
from jaxrel.train.task import Task

_FEWEST, _MOST = 3, 200
"""Steps that are timed, in each turn."""
_TURNS = 8
"""Turns, so that a machine that drifts meets all measurements alike."""
_SAMPLES = 6
"""Steps under the profiler, at most."""
_RUNS = 20
"""Of the fixed computation on each device."""

Work = Callable[[Any], Callable[[], object]]
"""device -> a fixed computation on it alone, waited for; warm."""


@dataclass
class Loop:
    """Steps as the training loop makes them: one is always under way."""

    step: TrainStep
    """Compiled."""
    state: Any
    """Donated to every step."""

    def times(
        self, batch: Callable[[], Any], *, skip: int, fewest: int, seconds: float
    ) -> list[float]:
        """Seconds of one step after another, each with the batch that `batch()` has placed.

        The first `skip`, at least 2, are left out; then `fewest`, and more while there are
        `seconds` left. Raises FailedError where a loss is not finite: no such update is made.
        """
        found: list[float] = []
        ahead, last = None, time.perf_counter()
        ends = last + seconds
        while len(found) < skip + fewest or (len(found) < skip + _MOST and last < ends):
            placed = batch()
            self.state, record = self.step(self.state, placed)
            if ahead is not None:
                self._wait(ahead)
            ahead, began = record, last
            last = time.perf_counter()
            found.append(last - began)
        self._wait(ahead)
        return found[skip:]

    def moments(self, placed: Any, programs: Sequence[Program], *, shared: bool) -> Moments:
        """Of one step under the profiler. Raises RuntimeError or ValueError where there is none."""
        self.state, before = self.step(self.state, placed)
        records = []

        def dispatch() -> None:
            self.state, record = self.step(self.state, placed)
            records.append(record)
            self._wait(before)

        trace = traced(dispatch, lambda: self._wait(records[0]), programs)
        return moments(trace, shared=shared)

    def _wait(self, record: Any) -> None:
        if not jax.device_get(record).finite:
            raise FailedError("the loss is not finite: such a step updates nothing, and is faster")


@dataclass
class Steps:
    """Seconds of each step."""

    real: list[float] = field(default_factory=list)
    """With the batches of the feed, fetched and placed."""
    synthetic: list[float] = field(default_factory=list)
    """With one batch that is there already."""
    fetch: list[float] = field(default_factory=list)
    """Of those of the real steps: fetching and placing the batch."""


def time_steps(
    loop: Loop, feed: Feed, placed: Any, bench: Bench, *, ahead: int, seconds: float
) -> Steps:
    """Real steps, synthetic ones and the products of a step, by turns.

    `ahead` batches are read ahead and drained first, unless a step takes so long that this would
    be most of the time.
    """
    found, layout, ends = Steps(), loop.step.layout, time.perf_counter() + seconds

    def fetched() -> Any:
        start = time.perf_counter()
        batch = layout.place(next(feed))
        feed.get_state()
        fetches.append(time.perf_counter() - start)
        return batch

    each = seconds / _TURNS / 3
    (trial,) = loop.times(lambda: placed, skip=2, fewest=1, seconds=0.0)
    skip = 2 + (ahead if trial * ahead < each else 0)
    for turn in range(_TURNS):
        if turn and time.perf_counter() > ends:
            break
        fetches: list[float] = []
        bench.run(each)
        found.real += loop.times(fetched, skip=skip, fewest=_FEWEST, seconds=each)
        found.fetch += fetches[skip:]
        found.synthetic += loop.times(lambda: placed, skip=2, fewest=_FEWEST, seconds=each)
    return found


def sample_moments(
    loop: Loop, placed: Any, programs: Sequence[Program], *, shared: bool, seconds: float
) -> list[Moments] | str:
    """One traced step, and more while there are `seconds` left; or why there is none."""
    found, ends = [], time.perf_counter() + seconds
    try:
        while not found or (len(found) < _SAMPLES and time.perf_counter() < ends):
            found.append(loop.moments(placed, programs, shared=shared))
        return found
    except (RuntimeError, ValueError) as error:  # another profiler, or no trace that can be read
        return f"{type(error).__name__}: {error}"


def one_device(
    config: Config, task: Task, layout: Layout, batch: Mapping[str, Any], seconds: float
) -> float | str:
    """Seconds of one device's share of the step without collectives, or why it cannot be told.

    It is the same step on a mesh of one device, with the groups of one. That device then has the
    whole optimizer state, of which the real one has a part: the share is rather too long.
    """
    if layout.mesh.size == 1:
        return "there is one device"
    if layout.mesh.size != layout.shards:
        return "axes beyond data and fsdp divide the products themselves"
    groups = layout.local_groups
    size = config.batch.global_size // layout.shards
    alone = replace(config, batch=replace(config.batch, groups=groups, global_size=size))
    mesh = build_mesh(dict.fromkeys(layout.mesh.shape, 1), jax.local_devices()[:1])
    try:
        step = make_step(alone, task, mesh)
        mine = layout.group_ids()[0, :, 0]
        placed = step.layout.place({name: x[mine] for name, x in batch.items()})
        loop = Loop(step.compiled(placed), step.init(config.run.seed))
        times = loop.times(lambda: placed, skip=2, fewest=_FEWEST, seconds=seconds)
    except jax.errors.JaxRuntimeError as error:  # the whole state may not fit into one device
        return str(error).splitlines()[0]
    return statistics.median(times)


def fixed_work(device: Any) -> Callable[[], object]:
    """Products and elementwise work of a few milliseconds, the same on every device."""
    edge, times = (256, 4) if device.platform == "cpu" else (4096, 8)
    x = jax.device_put(jnp.full((edge, edge), 1 / edge, jnp.float32), device)
    run = jax.jit(lambda x: lax.fori_loop(0, times, lambda _, y: jnp.tanh(x @ y), x))
    jax.block_until_ready(run(x))
    return lambda: jax.block_until_ready(run(x))


def time_locally(devices: Sequence[Any], work: Work) -> dict[str, float]:
    """Seconds of the fixed computation on each device by itself, by its name in a trace.

    The best of some runs, by turns: other work on a shared machine is no slow device.
    """
    runs = {f"{d.platform.upper()}:{d.local_hardware_id}": work(d) for d in devices}
    best = dict.fromkeys(runs, np.inf)
    for _ in range(_RUNS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best
