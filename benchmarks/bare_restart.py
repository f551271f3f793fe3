"""The training script that a good user of plain JAX and Orbax writes: the baseline of `recovery`.

One process of two; `bare_restart.sh` starts them again and again. `jax.distributed`, one
`jax.jit`, a `CheckpointManager` that saves in the background, and JAX's own compilation
cache and timeouts as JAX sets them. Only what has to be is imported, and batches are random
numbers, so nothing here waits for a data pipeline. What it is at stands in `DIR/marks-N`.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from benchmarks import bare_step
from jaxrel.config import Config, OptimizerConfig
from jaxrel.config_file import load
from jaxrel.mesh.build import build_mesh, degrees
from jaxrel.models import transformer
from jaxrel.train.state import TrainState
from jaxrel.train.step import TrainStep, make_train_step

PROCESSES = 2


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare_restart")
    parser.add_argument("--config", type=Path, required=True, help="of a run of jaxrel")
    parser.add_argument("--dir", type=Path, required=True, help="of checkpoints and marks")
    parser.add_argument("--compiled", type=Path, required=True, help="of compiled programs")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--devices", type=int, required=True, help="simulated in this process")
    parser.add_argument("--until", type=int, required=True, help="last step, which is saved")
    given = parser.parse_args()
    marks = Marks(given.dir / f"marks-{given.process}")
    marks("start")
    config = load(given.config)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", given.devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_compilation_cache_dir", str(given.compiled))
    marks("join")
    jax.distributed.initialize(f"127.0.0.1:{given.port}", PROCESSES, given.process)
    train(config, given.dir, given.until, marks)


class Marks:
    """Says what the process is at, in lines `TIME NAME`."""

    def __init__(self, path: Path) -> None:
        """Append to `path`, the number of this process first."""
        self._file = path.open("a", buffering=1)
        self(f"pid {os.getpid()}")

    def __call__(self, name: str) -> None:
        """From here on the process is at `name`."""
        self._file.write(f"{time.time():.6f} {name}\n")


def train(config: Config, directory: Path, until: int, marks: Marks) -> None:
    """From the newest checkpoint, or from the beginning, to step `until`."""
    mesh = build_mesh(degrees(config.mesh))
    step, jitted = make_step(config, mesh)
    marks("restore")
    options = ocp.CheckpointManagerOptions(max_to_keep=3, save_interval_steps=until)
    with ocp.CheckpointManager(directory / "checkpoints", options=options) as manager:
        state, done = restored(manager, step, config.run.seed)
        marks("compile")
        placed = place(step, batch(config, done))
        compiled = jitted.lower(step.abstract_state, placed).compile()
        marks("first_step")
        while done < until:
            state, (loss, _) = compiled(state, placed)
            done += 1
            placed = place(step, batch(config, done))
            float(loss)
            marks(f"step {done}")
            manager.save(done, args=ocp.args.StandardSave(_without_key(state)))


def make_step(config: Config, mesh: Any) -> tuple[TrainStep, Any]:
    """Shapes and shardings of the state, and the bare step in them."""
    model, optimizer = config.model, make_optimizer(config.optimizer, config.run.steps)
    loss_fn = transformer.loss_fn(model)
    step = make_train_step(
        transformer.init_fn(model), loss_fn, optimizer, mesh,
        groups=config.batch.groups, axes=transformer.logical_axes(model),
        rules=config.mesh.rules,
    )  # fmt: skip
    return step, bare_step.make_bare_step(step, loss_fn, optimizer, config.optimizer.clip_norm)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW with a warm-up and a cosine decay."""
    peak = config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, config.warmup_steps, steps, peak * config.final_fraction
    )
    return optax.adamw(schedule, config.b1, config.b2, weight_decay=config.weight_decay)


def restored(manager: ocp.CheckpointManager, step: TrainStep, seed: int) -> tuple[TrainState, int]:
    """The newest checkpoint's state and step, or a new state and 0."""
    latest = manager.latest_step()
    if latest is None:
        return step.init(seed), 0
    wanted = ocp.args.StandardRestore(_without_key(step.abstract_state))
    found = manager.restore(latest, args=wanted)
    key = jax.jit(jax.random.key, static_argnums=0, out_shardings=step.abstract_state.rng.sharding)
    return TrainState(found["params"], found["opt_state"], found["step"], key(seed)), latest


def batch(config: Config, done: int) -> dict[str, np.ndarray]:
    """Tokens [global batch, sequence + 1] of the step after `done`."""
    shape = (config.batch.global_size, config.batch.sequence + 1)
    generator = np.random.default_rng([config.run.seed, done])
    return {"tokens": generator.integers(0, config.model.vocabulary, shape, dtype=np.int32)}


def place(step: TrainStep, rows: Any) -> Any:
    """A batch on the devices of all processes; `jax.device_put` would compare it across them."""
    sharding = jax.sharding.NamedSharding(step.layout.mesh, bare_step.BATCH_SPEC)

    def one(x: np.ndarray) -> jax.Array:
        split = x.reshape(step.layout.local_groups, -1, *x.shape[1:])
        return jax.make_array_from_callback(split.shape, sharding, lambda index: split[index])

    return jax.tree.map(one, rows)


def _without_key(state: TrainState) -> dict[str, Any]:
    """The random key follows from the seed, and Orbax stores none."""
    return {"params": state.params, "opt_state": state.opt_state, "step": state.step}


if __name__ == "__main__":
    main()
