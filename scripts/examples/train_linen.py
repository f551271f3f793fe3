"""Train a Flax Linen module of your own.

    python scripts/examples/train_linen.py --cpu-devices 8

`from_linen` makes the two functions that jaxrel trains. Dropout draws its noise from (seed,
step, group), so the digest of the state is the same on 1, 2, 4 and 8 devices.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from jaxrel import make_train_step
from jaxrel.digest import state_digest
from jaxrel.mesh.build import build_mesh
from jaxrel.models.adapters import from_linen

CONTEXT, WIDTH = 8, 64
TEXT = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)


class Model(linen.Module):
    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = linen.Embed(256, WIDTH)(tokens).reshape(-1, CONTEXT * WIDTH)
        x = linen.gelu(linen.Dense(4 * WIDTH)(x))
        return linen.Dense(256)(linen.Dropout(0.1, deterministic=False)(x))


def loss(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Predict a byte from the eight before it."""
    logits = model(batch["context"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
    return jnp.mean(losses), {"accuracy": jnp.mean(logits.argmax(axis=-1) == batch["next"])}


def batch(step: int) -> dict[str, np.ndarray]:
    """Rows of this very file, chosen by the step alone: a resumed run sees the same ones."""
    starts = np.random.default_rng((0, step)).integers(0, len(TEXT) - CONTEXT, 64)
    windows = TEXT[starts[:, None] + np.arange(CONTEXT + 1)]
    return {"context": windows[:, :-1], "next": windows[:, -1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cpu-devices", type=int, help="simulate this many devices")
    args = parser.parse_args()
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)

    init_fn, loss_fn = from_linen(Model(), loss, example=batch(0))
    step = make_train_step(
        init_fn,
        loss_fn,
        optax.adamw(3e-3),
        build_mesh({"data": -1, "fsdp": 1}),
        groups=8,
        reduction="invariant",
        clip_norm=1.0,
    )
    state = step.init(seed=0)
    for i in range(args.steps):
        state, record = step(state, step.place(batch(i)))
        if i % 10 == 0 or i + 1 == args.steps:
            digest = state_digest(state, record.words)
            print(f"step {i + 1} loss {float(record.loss):.4f} digest {digest}", flush=True)


if __name__ == "__main__":
    main()
