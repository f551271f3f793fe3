"""The step that a good user of plain JAX would write: the baseline of `step_overhead`.

One `jax.jit`, parameters and moments sharded by `NamedSharding`, the collectives left to
the compiler, gradients accumulated by `lax.scan`. No taps, no digest, no finite check.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxrel.gather import Shard, gathered_by
from jaxrel.train.state import TrainState
from jaxrel.train.step import LossFn, TrainStep

BATCH_SPEC = P(None, ("data", "fsdp"))
"""A batch [microbatches, rows, ...]: as many microbatches as a device has groups."""


def make_bare_step(step: TrainStep, loss_fn: LossFn, optimizer: Any, clip_norm: float) -> Any:
    """A jitted `(state, batch) -> (state, (loss, grad norm))` in the shardings of `step`.

    `batch` leaves are [local groups, global batch / local groups, ...], sharded as
    `BATCH_SPEC`; the state is donated.
    """
    mesh, hooked = step.layout.mesh, gathered_by(loss_fn)
    stored = jax.tree.map(lambda a: a.sharding.spec, step.abstract_state.params)
    # ZeRO: while the step computes, parameters are whole on the data axis.
    used = jax.tree.map(lambda spec: _without(spec, "data"), stored)
    chain: Any = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)

    def constrain(tree: Any, specs: Any) -> Any:
        return jax.tree.map(lambda x, s: lax.with_sharding_constraint(x, _on(mesh, s)), tree, specs)

    def whole_layer(spec: P, value: jax.Array, _: Any, dtype: Any) -> jax.Array:
        """One layer's parameter, gathered over fsdp where the model uses it."""
        value = value if dtype is None else value.astype(dtype)
        return lax.with_sharding_constraint(value, _on(mesh, P(*_without(spec, "fsdp")[1:])))

    def seen(params: Any) -> Any:
        """As the model sees parameters: stacked layers gather themselves, the rest is whole."""

        def one(path: Any, value: jax.Array, spec: P) -> Any:
            if jax.tree_util.keystr(path[:1], simple=True) in hooked:
                return Shard(value, jnp.zeros(value.shape[:1]), partial(whole_layer, spec))
            return lax.with_sharding_constraint(value, _on(mesh, _without(spec, "fsdp")))

        return jax.tree_util.tree_map_with_path(one, params, used)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        params = constrain(state.params, used)
        rng = jax.random.fold_in(state.rng, state.step)

        def one(rows: Any, j: jax.Array) -> tuple[jax.Array, Any]:
            key = jax.random.fold_in(rng, j)
            return jax.value_and_grad(lambda p: loss_fn(seen(p), rows, key)[0])(params)

        def body(total: Any, x: Any) -> tuple[Any, jax.Array]:
            loss, grads = one(*x)
            return constrain(jax.tree.map(jnp.add, total, grads), stored), loss

        k = step.layout.local_groups
        if k == 1:
            loss, grads = one(jax.tree.map(lambda x: x[0], batch), jnp.int32(0))
        else:
            zeros = constrain(jax.tree.map(jnp.zeros_like, params), stored)
            total, losses = lax.scan(body, zeros, (batch, jnp.arange(k)))
            loss, grads = jnp.mean(losses), jax.tree.map(lambda g: g / k, total)
        grads = constrain(grads, stored)
        updates, inner = chain.update(grads, (optax.EmptyState(), state.opt_state), state.params)
        new = optax.apply_updates(state.params, updates)
        return TrainState(new, inner[1], state.step + 1, state.rng), (
            loss, optax.tree.norm(grads),
        )  # fmt: skip

    shardings = jax.tree.map(lambda a: a.sharding, step.abstract_state)
    return jax.jit(
        train_step,
        in_shardings=(shardings, _on(mesh, BATCH_SPEC)),
        out_shardings=(shardings, _on(mesh, P())),
        donate_argnums=0,
    )


def place(step: TrainStep, batch: Any) -> Any:
    """A global batch [global batch, ...] of host arrays as `make_bare_step` takes it."""
    k, sharding = step.layout.local_groups, _on(step.layout.mesh, BATCH_SPEC)
    return jax.tree.map(lambda x: jax.device_put(x.reshape(k, -1, *x.shape[1:]), sharding), batch)


def _on(mesh: Any, spec: P) -> Any:
    return jax.sharding.NamedSharding(mesh, spec)


def _without(spec: P, axis: str) -> P:
    def one(entry: Any) -> Any:
        names = entry if isinstance(entry, tuple) else (entry,)
        left = tuple(n for n in names if n is not None and n != axis)
        return left[0] if len(left) == 1 else left or None

    return P(*(one(entry) for entry in spec))
