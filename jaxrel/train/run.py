"""`jaxrel train`: a configuration becomes a run.

Everything that can be refused is refused before anything is compiled or written.
"""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax

from jaxrel.checkpoint import Checkpointer
from jaxrel.checkpoint.together import together
from jaxrel.config import BatchConfig, Config, OptimizerConfig, check
from jaxrel.data.pipeline import Feed, open_feed
from jaxrel.exit_codes import ExitCode, UsageError
from jaxrel.mesh.build import build_mesh, degrees
from jaxrel.mesh.join import fix_cpu_threads, joined, use_cpu_devices
from jaxrel.models import transformer
from jaxrel.provenance import check_run, provenance, write_run_files
from jaxrel.run_lock import claim
from jaxrel.train.loop import Trainer
from jaxrel.train.progress import ProgressLine
from jaxrel.train.step import TrainStep, make_train_step
from jaxrel.train.stop import StopSignal


def train(config: Config) -> int:
    """Train as configured, from the newest checkpoint if there is one; returns an exit code.

    Raises JaxrelError with the code of its kind.
    """
    check_run(config.run.dir, config)
    fix_cpu_threads()
    if config.mesh.cpu_devices is not None:
        use_cpu_devices(config.mesh.cpu_devices)
    with joined(config.job), StopSignal() as stop:
        _train(config, stop)
    return ExitCode.OK


def _train(config: Config, stop: StopSignal) -> None:
    mesh = build_mesh(degrees(config.mesh))
    resolved = dict(mesh.shape)
    known = {name: resolved[name] for name in ("data", "fsdp", "tensor")}
    check(replace(config, mesh=replace(config.mesh, **known)))
    step = make_step(config, mesh)  # traced here, compiled at its first use
    groups = step.layout.process_groups()
    feed = open_feed(config.data, config.batch, seed=config.run.seed, groups=groups)
    try:
        _check_vocabulary(config, feed)
        checkpointer = Checkpointer(
            config.checkpoint_dir(),
            keep=config.checkpoint.keep,
            deadline_s=config.checkpoint.deadline_s,
        )
        trainer = make_trainer(config, step, feed, checkpointer, stop)
        latest = trainer.check_resume()
        if latest is not None and latest >= config.run.steps:
            trainer.progress.note(
                f"already complete: step {latest} is saved, run.steps is {config.run.steps}"
            )
            return
        together(lambda: _begin_run(config, resolved))
        digest = trainer.run()
        trainer.progress.note(f"finished: step {config.run.steps}, state digest {digest}")
    finally:
        feed.close()


def _begin_run(config: Config, degrees: dict[str, int]) -> None:
    """Process 0's part: hold the run directory, and say what this start is made of."""
    if jax.process_index() == 0:
        claim(config.run.dir)
        record = provenance(config, sys.argv, jax.devices(), degrees)
        write_run_files(config.run.dir, config, record)


def make_step(config: Config, mesh: Any) -> TrainStep:
    """The step of the reference transformer."""
    return make_train_step(
        transformer.init_fn(config.model),
        transformer.loss_fn(config.model),
        make_optimizer(config.optimizer, config.run.steps),
        mesh,
        groups=config.batch.groups,
        reduction=config.batch.reduction,
        clip_norm=config.optimizer.clip_norm,
        axes=transformer.logical_axes(config.model),
        rules=config.mesh.rules,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW with linear warm-up and cosine decay; weight decay on matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_fraction,
    )
    return optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=partial(jax.tree_util.tree_map_with_path, _is_matrix),
    )


def make_trainer(
    config: Config, step: TrainStep, feed: Feed, checkpointer: Checkpointer, stop: StopSignal
) -> Trainer:
    """The loop over these parts; only process 0 shows progress."""
    total, batch = config.run.steps, config.batch
    progress = ProgressLine(total, batch.global_size * batch.sequence, config.run.print_every)
    progress.console.quiet = jax.process_index() != 0
    facts = {"seed": config.run.seed, **_batch_facts(batch)}
    interval, seed = config.checkpoint.interval, config.run.seed
    return Trainer(step, feed, checkpointer, progress, total, interval, seed, facts, stop)


def _batch_facts(batch: BatchConfig) -> dict[str, Any]:
    return {
        "groups": batch.groups,
        "reduction": batch.reduction,
        "global_batch": batch.global_size,
        "sequence": batch.sequence,
    }


def _is_matrix(path: Any, leaf: Any) -> bool:
    """Whether weight decay applies: not to norm scales, whose last key is `scale`."""
    return jax.tree_util.keystr(path[-1:], simple=True) != "scale"


def _check_vocabulary(config: Config, feed: Feed) -> None:
    tokens = feed.fingerprint.get("vocabulary")
    if isinstance(tokens, int) and tokens > config.model.vocabulary:
        raise UsageError(
            f"model.vocabulary: got {config.model.vocabulary}: the corpus has {tokens} token ids"
        )
