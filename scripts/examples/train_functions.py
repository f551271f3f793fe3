"""Train a model of plain functions, gathered a layer at a time.

    python scripts/examples/train_functions.py --cpu-devices 8

Two functions are all that jaxrel asks of a model. `gathers` and `gather` are the hook by
which a device holds one whole layer at a time instead of all of them. The digest of the
state is the same on 1, 2, 4 and 8 devices.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrel import make_train_step
from jaxrel.digest import state_digest
from jaxrel.gather import gather, gathers, remat_policy
from jaxrel.mesh.build import build_mesh

CONTEXT, WIDTH = 8, 64
TEXT = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)


def init_fn(rng: jax.Array) -> Any:
    keys = jax.random.split(rng, 3)
    return {
        "embed": jax.random.normal(keys[0], (CONTEXT, 256, WIDTH)) / CONTEXT,
        "layers": {"kernel": jax.random.normal(keys[1], (4, WIDTH, WIDTH)) / WIDTH**0.5},
        "head": jax.random.normal(keys[2], (WIDTH, 256)) / WIDTH**0.5,
    }


@gathers("layers")
def loss_fn(params: Any, batch: Any, rng: jax.Array) -> tuple[jax.Array, Any]:
    """Predict a byte from the eight before it; no noise, no metrics."""

    def layer(x: jax.Array, sharded: Any) -> tuple[jax.Array, None]:
        whole = gather(sharded, dtype=jnp.bfloat16)
        return x + jax.nn.gelu(x.astype(jnp.bfloat16) @ whole["kernel"]), None

    # Inside the checkpoint, so that the backward pass gathers again and no layer is kept.
    layer = jax.checkpoint(layer, policy=remat_policy("full"), prevent_cse=False)
    x = jnp.sum(params["embed"][jnp.arange(CONTEXT), batch["context"]], axis=1)
    x, _ = jax.lax.scan(layer, x, params["layers"])
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["next"])
    return jnp.mean(losses), {}


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

    step = make_train_step(
        init_fn,
        loss_fn,
        optax.adamw(3e-3),
        build_mesh({"data": 1, "fsdp": -1}),
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
