"""The training script to copy: `jaxrel train` with a model of your own.

    python scripts/train.py scripts/configs/tiny.yaml --run.dir run --mesh.cpu_devices 8
    jaxrel launch --hosts 2 --cpu-devices 4 -- \\
        python scripts/train.py scripts/configs/tiny.yaml --run.dir run

Replace the model, the loss and the optimizer. Everything else is `jaxrel train`: its keys
(`--help`), its data, checkpoints, evaluation, exit codes and record. A batch is
{"tokens": int32 [rows of a group, batch.sequence + 1]}, or what your data.pipeline gives.
"""

import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxrel.cli import command
from jaxrel.config import Config, ModelConfig
from jaxrel.models.adapters import from_nnx
from jaxrel.train.task import Task


class Model(nnx.Module):
    """Predicts a token from itself and those before it, by a gated recurrence."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width = config.hidden
        self.embed = nnx.Embed(config.vocabulary, width, rngs=rngs)
        self.gates = nnx.Linear(width, 2 * width, rngs=rngs)
        self.hidden = nnx.Linear(width, 4 * width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.head = nnx.Linear(4 * width, config.vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens int32 [b, S] -> logits float32 [b, S, vocabulary]."""
        keep, new = jnp.split(self.gates(self.embed(tokens)), 2, axis=-1)
        keep = nnx.sigmoid(keep + 1)

        def remember(memory: jax.Array, gates: Any) -> tuple[jax.Array, jax.Array]:
            keep, new = gates
            memory = keep * memory + (1 - keep) * jnp.tanh(new)
            return memory, memory

        gates = keep.swapaxes(0, 1), new.swapaxes(0, 1)  # time first
        _, memories = jax.lax.scan(remember, jnp.zeros_like(new[:, 0]), gates)
        return self.head(self.dropout(nnx.gelu(self.hidden(memories.swapaxes(0, 1)))))


def loss(model: Model, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the next tokens in nats, and what is to be recorded beside it."""
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses), {"accuracy": jnp.mean(logits.argmax(-1) == tokens[:, 1:])}


def make_task(config: Config) -> Task:
    """What is trained, as configured."""
    init_fn, loss_fn = from_nnx(lambda rngs: Model(config.model, rngs), loss)
    plain = replace(config.model, dropout=0.0)
    _, evaluation_loss_fn = from_nnx(lambda rngs: Model(plain, rngs), loss)
    schedule = optax.warmup_constant_schedule(
        0.0, config.optimizer.learning_rate, config.optimizer.warmup_steps
    )
    return Task(init_fn, loss_fn, optax.adamw(schedule), evaluation_loss_fn, schedule)


if __name__ == "__main__":
    command(["train", *sys.argv[1:]], make_task)
