"""What is trained: a model, its optimizer, and how it is judged."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import optax

from jaxrel.config import Config, OptimizerConfig
from jaxrel.models import transformer
from jaxrel.train.step import InitFn, LossFn


@dataclass(frozen=True)
class Task:
    """What `train` needs besides the configuration; see `make_train_step` for the functions."""

    init_fn: InitFn
    loss_fn: LossFn
    """Of batches {"tokens": int32 [b, sequence + 1]}, or of what data.pipeline gives."""
    optimizer: optax.GradientTransformation
    evaluation_loss_fn: LossFn | None = None
    """Like `loss_fn`, without noise, its loss a mean over rows; None cannot be evaluated."""
    schedule: optax.Schedule | None = None
    """Learning rate by completed updates, to be recorded."""
    axes: Any = None
    """Logical axis names of the parameters, for mesh.rules."""


MakeTask = Callable[[Config], Task]


def reference_task(config: Config) -> Task:
    """The reference transformer with AdamW."""
    schedule = make_schedule(config.optimizer, config.run.steps)
    return Task(
        init_fn=transformer.init_fn(config.model),
        loss_fn=transformer.loss_fn(config.model),
        optimizer=make_optimizer(config.optimizer, schedule),
        evaluation_loss_fn=transformer.loss_fn(replace(config.model, dropout=0.0)),
        schedule=schedule,
        axes=transformer.logical_axes(config.model),
    )


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up and cosine decay, by completed updates."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_fraction,
    )


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """AdamW; weight decay on matrices only."""
    return optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=partial(jax.tree_util.tree_map_with_path, _is_matrix),
    )


def _is_matrix(path: Any, leaf: Any) -> bool:
    """Whether weight decay applies: not to norm scales, whose last key is `scale`."""
    return jax.tree_util.keystr(path[-1:], simple=True) != "scale"
