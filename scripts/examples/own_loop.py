"""A loop of your own over plain functions, with three parts of jaxrel and nothing else.

    jaxrel launch --dir run -- python scripts/examples/own_loop.py

`TrainState` is what is saved, `Checkpointer` saves it, `Ledger` accounts for the time.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrel import Checkpointer, Ledger, TrainState

CONTEXT, WIDTH, BATCH, INTERVAL = 16, 64, 32, 50
TEXT = np.frombuffer(Path(json.__file__).read_bytes(), np.uint8)
OPTIMIZER = optax.adamw(1e-3)


def init(rng: jax.Array) -> TrainState:
    a, b = jax.random.split(rng)
    params = {
        "embed": jax.random.normal(a, (CONTEXT, 256, WIDTH)) / CONTEXT,
        "head": jax.random.normal(b, (WIDTH, 256)) / WIDTH**0.5,
    }
    return TrainState.create(params, OPTIMIZER, rng)


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """Predict a byte from those before it."""
    x = jnp.sum(params["embed"][jnp.arange(CONTEXT), tokens[:, :-1]], axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        jax.nn.gelu(x) @ params["head"], tokens[:, -1]
    )
    return jnp.mean(losses)


@jax.jit
def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    loss, gradient = jax.value_and_grad(loss_fn)(state.params, tokens)
    updates, opt_state = OPTIMIZER.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, state.step + 1, state.rng), loss


def batch(step: int) -> np.ndarray:
    """Chosen by the step alone: a resumed run sees the same ones."""
    starts = np.random.default_rng((0, step)).integers(0, len(TEXT) - CONTEXT, BATCH)
    return TEXT[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    state = init(jax.random.key(0))
    with Checkpointer("run/checkpoints") as checkpointer:
        if checkpointer.latest() is not None:
            state, _ = checkpointer.restore(jax.eval_shape(lambda: state))
        if int(state.step) >= steps:
            print(f"already complete: step {int(state.step)}")
            return
        with Ledger("run") as ledger:
            ledger.resumed(int(state.step), devices=jax.device_count())
            for step in range(int(state.step), steps):
                state, loss = train_step(state, batch(step))
                ledger.step(step + 1, loss=loss)
                if (step + 1) % INTERVAL == 0 or step + 1 == steps:
                    digest = checkpointer.save(step + 1, state)
                if step % 20 == 0 or step + 1 == steps:
                    print(f"step {step + 1}  loss {float(loss):.6f}", flush=True)
            checkpointer.wait()
            ledger.finished(steps, digest)


if __name__ == "__main__":
    main()
