"""The plain Flax Linen training script, made resumable, supervised and reported."""

import argparse
import json
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import jaxrel

CONTEXT, WIDTH, BATCH = 16, 64, 32
TEXT = np.frombuffer(Path(json.__file__).read_bytes(), np.uint8)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(256, WIDTH)(tokens).reshape(len(tokens), CONTEXT * WIDTH)
        return nn.Dense(256)(nn.gelu(nn.Dense(4 * WIDTH)(x)))


@jax.jit
def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: dict) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1])
        return jnp.mean(losses)

    loss, gradient = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradient), loss


def window(start: int) -> np.ndarray:
    return TEXT[start : start + CONTEXT + 1].astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    model = Model()
    params = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
    starts = grain.MapDataset.range(len(TEXT) - CONTEXT).shuffle(seed=0).repeat()
    batches = iter(starts.map(window).batch(BATCH).to_iter_dataset())
    run = jaxrel.attach("run", state, steps=args.steps, data=batches, interval=50)
    for step in run:
        state, loss = train_step(run.state, next(batches))
        run.completed(state, loss=loss)
        if step % 20 == 0 or step + 1 == args.steps:
            print(f"step {step + 1}  loss {float(loss):.6f}", flush=True)


if __name__ == "__main__":
    main()
