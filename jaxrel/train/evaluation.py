"""The held-out loss, exact on every mesh.

Every row's loss is computed apart, by the same program in the same groups as in training, and
comes back to the host in the order of the rows; the host then takes the mean of those that
count. So a row that only fills up the last batch changes nothing, and neither does the mesh.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import fsum
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxrel.gather import Shard, gathered_by
from jaxrel.mesh.layout import BATCH_SPEC
from jaxrel.train.backward import all_gather_leaf
from jaxrel.train.reduction import REDUCTIONS
from jaxrel.train.step import LossFn, TrainStep

RowLosses = Callable[[Any, Any], jax.Array]


def make_row_losses(step: TrainStep, loss_fn: LossFn) -> RowLosses:
    """(parameters, placed batch) -> the loss of every row, float32 [groups, rows a group].

    `loss_fn` is like the one that `step` was made with, without dropout, and its loss is a
    mean over rows: it is given one row at a time. It is compiled once, at its first use; the
    result is on all devices.
    """
    layout, hooked = step.layout, gathered_by(loss_fn)
    gathers = jax.tree.map(lambda leaf: partial(all_gather_leaf, layout, leaf), step.leaves)
    key = jax.random.key(0)

    def whole(path: Any, gather: Any, x: jax.Array) -> Any:
        name = jax.tree_util.keystr(path[:1], simple=True)
        if name not in hooked:
            return gather(x, None, None)
        probe = jax.numpy.zeros(x.shape[:1] if hooked[name] else ())
        return Shard(x, probe, gather)

    def local(params: Any, batch: Any) -> jax.Array:
        params = jax.tree_util.tree_map_with_path(whole, gathers, params)

        def one_row(row: Any) -> jax.Array:
            return loss_fn(params, jax.tree.map(lambda x: x[None], row), key)[0]

        groups = jax.tree.map(lambda x: x.reshape(layout.local_groups, *x.shape[3:]), batch)
        losses = lax.map(jax.vmap(one_row), groups)  # [local groups, rows]
        table = lax.all_gather(losses, ("data", "fsdp"))
        table = table.reshape(layout.data, layout.fsdp, layout.local_groups, -1)
        return table.swapaxes(1, 2).reshape(layout.groups, -1)

    specs = jax.tree.map(lambda leaf: leaf.manual, step.leaves)
    mapped = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(specs, BATCH_SPEC),
        out_specs=P(),
        axis_names=layout.manual_axes,
        check_vma=False,
    )
    shardings = jax.tree.map(lambda x: x.sharding, step.abstract_state.params)
    return jax.jit(
        mapped,
        in_shardings=(shardings, layout.sharding(BATCH_SPEC)),
        out_shardings=layout.sharding(P()),
        compiler_options=REDUCTIONS[step.reduction].compiler_options,
    )


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, and when."""

    every: int
    """Steps."""
    row_losses: RowLosses
    batches: Iterable[tuple[Any, np.ndarray]]
    """Iterated anew at each evaluation."""

    def loss(self, step: TrainStep, params: Any) -> tuple[float, int]:
        """`held_out_loss` over these batches."""
        return held_out_loss(step, self.row_losses, params, self.batches)


def held_out_loss(
    step: TrainStep, row_losses: RowLosses, params: Any, batches: Iterable[tuple[Any, np.ndarray]]
) -> tuple[float, int]:
    """Mean loss over the rows of weight 1, and how many they are.

    `batches` gives (this process's groups of a batch, weights [groups, rows] of the whole
    batch), as `data.held_out.HeldOut` does. Collective: every process calls it, with the same
    number of batches.
    """
    losses = [
        np.asarray(row_losses(params, step.layout.place(batch)), np.float64)[weights > 0]
        for batch, weights in batches
    ]
    rows = sum(x.size for x in losses)
    return fsum(float(x) for row in losses for x in row) / rows, rows
