"""A plain Flax NNX training script: a small language model on Python's own source."""

import argparse
import json
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

CONTEXT, WIDTH, BATCH = 16, 64, 32
TEXT = np.frombuffer(Path(json.__file__).read_bytes(), np.uint8)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.hidden = nnx.Linear(CONTEXT * WIDTH, 4 * WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(4 * WIDTH, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens).reshape(len(tokens), CONTEXT * WIDTH)
        return self.head(self.dropout(nnx.gelu(self.hidden(x))))


def loss_fn(model: Model, tokens: jax.Array) -> jax.Array:
    """Predict a byte from those before it."""
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1])
    return jnp.mean(losses)


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, gradient = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, gradient)
    return loss


def window(start: int) -> np.ndarray:
    return TEXT[start : start + CONTEXT + 1].astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    starts = grain.MapDataset.range(len(TEXT) - CONTEXT).shuffle(seed=0).repeat()
    batches = iter(starts.map(window).batch(BATCH).to_iter_dataset())
    for step in range(args.steps):
        loss = train_step(model, optimizer, next(batches))
        if step % 20 == 0 or step + 1 == args.steps:
            print(f"step {step + 1}  loss {float(loss):.6f}", flush=True)


if __name__ == "__main__":
    main()
