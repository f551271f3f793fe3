"""Trains small models of every kind of state: `python -m tests.checkpoint.exact MODE DIRECTORY`."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrel.checkpoint import Checkpointer

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 20)


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "adamw": optax.adamw(1e-2),
    "multi steps": optax.MultiSteps(optax.adam(1e-2), 3).gradient_transformation(),
    "masked": optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.masked(optax.scale_by_adam(), _matrices),
        optax.scale_by_schedule(lambda count: -jnp.asarray(SCHEDULE(count))),
    ),
    "averaged": optax.chain(optax.sgd(1e-2, momentum=0.9), optax.ema(0.9)),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
}
KINDS = {
    **{name: (name, jnp.float32, "threefry2x32") for name in OPTIMIZERS},
    "bfloat16": ("adamw", jnp.bfloat16, "threefry2x32"),
    "rbg": ("adamw", jnp.float32, "rbg"),
}
"""Name -> optimizer, dtype of the parameters, implementation of the random key."""


def init(kind: str) -> dict[str, Any]:
    """Parameters, optimizer state, a slow average, a key, and integers that wrap around."""
    name, dtype, impl = KINDS[kind]
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = ((8, 16), (16, 4))
    params: dict[str, Any] = {
        f"w{i}": jax.random.normal(k, s).astype(dtype)
        for i, (k, s) in enumerate(zip(keys, shapes, strict=True))
    }
    params["bias"] = jnp.zeros(4, dtype)
    return {
        "params": params,
        "opt": OPTIMIZERS[name].init(params),
        "average": jax.tree.map(lambda x: jnp.array(x, jnp.float32), params),
        "rng": jax.random.key(7, impl=impl),
        "count": jnp.int32(0),
        "wrapping": jnp.uint8(250),
    }


def update(kind: str) -> Any:
    """The step, with dropout."""
    optimizer = OPTIMIZERS[KINDS[kind][0]]

    def step(state: dict[str, Any]) -> dict[str, Any]:
        rng, key = jax.random.split(state["rng"])
        x = jax.random.normal(jax.random.fold_in(jax.random.key(1), state["count"]), (32, 8))

        def loss(params: Any) -> jax.Array:
            h = jnp.tanh(x.astype(params["w0"].dtype) @ params["w0"])
            h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)
            y = (h @ params["w1"] + params["bias"]).astype(jnp.float32)
            return jnp.mean((y - x[:, :4]) ** 2)

        gradient = jax.grad(loss)(state["params"])
        updates, opt = optimizer.update(gradient, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
        counts = {"count": state["count"] + 1, "wrapping": state["wrapping"] + jnp.uint8(1)}
        return {"params": params, "opt": opt, "average": average, "rng": rng, **counts}

    return jax.jit(step, donate_argnums=0)


def digest(state: Any) -> str:
    """Of the bytes of every leaf; not jaxrel's own."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        plain = (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        )
        total.update(f"{plain.dtype} {plain.shape}".encode() + np.asarray(plain).tobytes())
    return total.hexdigest()


def straight(kind: str) -> str:
    """20 steps."""
    state, step = init(kind), update(kind)
    for _ in range(20):
        state = step(state)
    return digest(state)


def begin(kind: str, directory: Path) -> Checkpointer:
    """10 steps, a save, and some more that will be lost with the process."""
    state, step = init(kind), update(kind)
    checkpointer = Checkpointer(directory / kind)
    for done in range(1, 14):
        state = step(state)
        if done == 10:
            checkpointer.save(done, state)
    checkpointer.wait()
    return checkpointer


def resume(kind: str, directory: Path) -> str:
    """The other 10."""
    step = update(kind)
    with Checkpointer(directory / kind) as checkpointer:
        state, found = checkpointer.restore(jax.eval_shape(lambda: init(kind)))
        for _ in range(found["step"], 20):
            state = step(state)
    return digest(state)


def main() -> None:
    mode, directory = sys.argv[1], Path(sys.argv[2])
    if mode == "killed":
        print(json.dumps({kind: straight(kind) for kind in KINDS}), flush=True)
        kept = [begin(kind, directory) for kind in KINDS]
        assert len(kept) == len(KINDS)
        os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps({kind: resume(kind, directory) for kind in KINDS}), flush=True)


if __name__ == "__main__":
    main()
