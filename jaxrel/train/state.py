"""What a training run is, between two steps."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrel.digest import leaf_paths


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "opt_state", "step", "rng"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state, completed updates and the run's random key.

    `step` (int32 []) counts completed updates; it is the label of a checkpoint, the
    position of the schedule and of the data. `rng` is a typed key [] that never changes:
    noise is drawn from (rng, step, group), so it does not depend on the mesh.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    rng: jax.Array

    @classmethod
    def create(cls, params: Any, optimizer: optax.GradientTransformation, rng: Any) -> "TrainState":
        """The state before the first step. Runs under `jit`, and so in any sharding."""
        return cls(params, optimizer.init(params), jnp.zeros((), jnp.int32), rng)


def overflowed(state: TrainState, not_finite: Any) -> dict[str, int]:
    """Elements that are NaN or infinite, by leaf path: of parameters and of moments.

    `state` may be abstract; `not_finite` is `StepRecord.not_finite`, uint32 [leaves]. A number
    of an optimizer's own (a best loss so far) may be infinite for good reason and is left out.
    """
    counts = np.asarray(not_finite)
    if not counts.any():  # as at every step but the last one of a run that diverges
        return {}
    return {
        path: int(count)
        for path, leaf, count in zip(leaf_paths(state), jax.tree.leaves(state), counts, strict=True)
        if count and (leaf.ndim or path.startswith("params/"))
    }
