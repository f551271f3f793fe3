"""Small models and batches on which the step is tested."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh

from jaxrel.config import ModelConfig
from jaxrel.digest import leaf_digests, state_digest
from jaxrel.gather import gather, gathers, remat_policy
from jaxrel.models import transformer
from jaxrel.train.step import StepRecord, TrainStep, make_train_step

ROWS, SEQUENCE, GROUPS = 16, 16, 8
MODEL = ModelConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=64, vocabulary=64, dropout=0.1
)
RULES = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocabulary": "tensor"}


MLP_AXES = {
    "layers": {"w": (None, None, "mlp"), "b": (None, "mlp")},
    "out": (None,),
    "odd": (None,),
}


def mesh(data: int, fsdp: int, tensor: int = 1) -> Mesh:
    """A mesh over the first devices."""
    grid = np.array(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor)
    return Mesh(grid, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def tokens(step: int, vocabulary: int = MODEL.vocabulary) -> dict[str, np.ndarray]:
    """The global batch of a step."""
    rng = np.random.default_rng(step)
    return {"tokens": rng.integers(0, vocabulary, (ROWS, SEQUENCE + 1)).astype(np.int32)}


def transformer_step(model: ModelConfig, where: Mesh, **options: Any) -> TrainStep:
    """A step of the reference transformer with AdamW and clipping that clips."""
    options = {"groups": GROUPS, "reduction": "invariant", "clip_norm": 0.5} | options
    return make_train_step(
        transformer.init_fn(model),
        transformer.loss_fn(model),
        options.pop("optimizer", optax.adamw(1e-2, weight_decay=0.1)),
        where,
        axes=transformer.logical_axes(model),
        rules=RULES,
        **options,
    )


def run(step: TrainStep, steps: int = 4, seed: int = 0) -> tuple[str, list[StepRecord], Any]:
    """Final digest, records and state after some steps."""
    state, records = step.init(seed), []
    for i in range(steps):
        state, record = step(state, step.place(tokens(i)))
        records.append(jax.device_get(record))
    return state_digest(step.abstract_state, records[-1].words), records, state


def differing(step: TrainStep, a: StepRecord, b: StepRecord) -> list[str]:
    """Leaves whose digests differ."""
    one, two = (leaf_digests(step.abstract_state, r.words) for r in (a, b))
    return [path for path in one if one[path] != two[path]]


def mlp(
    depth: int = 3, width: int = 32, hook: bool = True, dtype: Any = jnp.float32
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A scanned residual network on {"x": [rows, width], "y": [rows]}: compiles in a blink."""

    def init_fn(rng: jax.Array) -> Any:
        a, b, c = jax.random.split(rng, 3)
        scale = width**-0.5
        return {
            "layers": {
                "w": (jax.random.normal(a, (depth, width, width)) * scale).astype(dtype),
                "b": jnp.zeros((depth, width), dtype),
            },
            "out": (jax.random.normal(b, (width,)) * scale).astype(dtype),
            "odd": (jax.random.normal(c, (3,))).astype(dtype),
        }

    def loss_fn(params: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> Any:
        def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            w = gather(w)
            return x + jnp.tanh(x @ w["w"] + w["b"]), None

        block = jax.checkpoint(block, policy=remat_policy("full"))
        x, _ = lax.scan(block, batch["x"], params["layers"])
        noise = jax.random.normal(rng, batch["y"].shape) * 0.01
        error = x @ params["out"] * 0.5 + params["odd"].sum() - batch["y"] + noise
        loss = jnp.mean(jnp.square(error)).astype(jnp.float32)
        return loss, {"mean_error": jnp.mean(error)}

    return init_fn, gathers("layers")(loss_fn) if hook else loss_fn


def mlp_step(where: Mesh, hook: bool = True, **options: Any) -> TrainStep:
    """A step of `mlp` with AdamW and clipping."""
    init_fn, loss_fn = mlp(hook=hook)
    options = {"axes": MLP_AXES, "rules": RULES} | options
    options = {"groups": GROUPS, "reduction": "invariant", "clip_norm": 1.0} | options
    optimizer = options.pop("optimizer", optax.adamw(1e-2))
    return make_train_step(init_fn, loss_fn, optimizer, where, **options)


def points(step: int, width: int = 32) -> dict[str, np.ndarray]:
    """A batch for `mlp`."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(ROWS, width)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1)).astype(np.float32)}
