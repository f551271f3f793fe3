"""The sharded training step: one global batch in, one exact update out.

`make_train_step` composes four parts, in the order in which data flows:

1. backward (inside `shard_map`): every group's loss and gradient, with taps; gradients are
   reduced over fsdp layer by layer, over a device's own groups, then over data;
2. the global norm, in blocks that are the same on every mesh;
3. clipping and the optimizer, on shards, kept out when anything is not finite;
4. the digest of the new state.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrel.digest import sharded_tree_words
from jaxrel.exit_codes import UsageError
from jaxrel.gather import gathered_by
from jaxrel.mesh.layout import BATCH_SPEC, Layout
from jaxrel.train.backward import make_backward
from jaxrel.train.elementwise import first_mixing_operation
from jaxrel.train.reduction import REDUCTIONS, Reduction, opaque_zero
from jaxrel.train.state import TrainState

log = logging.getLogger("jaxrel")

InitFn = Callable[[jax.Array], Any]
LossFn = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "loss", "grad_norm", "group_loss", "group_grad_norm", "metrics", "finite", "words",
        "not_finite",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclass(frozen=True)
class StepRecord:
    """What one step says of itself; every array is the same on all devices."""

    loss: jax.Array
    """Mean of the groups' losses, float32 []."""
    grad_norm: jax.Array
    """Global norm of the mean gradient, before clipping, float32 []."""
    group_loss: jax.Array
    """Loss of each group, float32 [groups]."""
    group_grad_norm: jax.Array
    """Norm of each group's own gradient, before any reduction, float32 [groups]."""
    metrics: Any
    """Means over groups of the scalars that the loss function returned."""
    finite: jax.Array
    """False when the update was kept out because loss or gradient was not finite, bool []."""
    words: jax.Array
    """Digest of every leaf of the new state (`digest.tree_words`), uint32 [leaves, 2]."""
    not_finite: jax.Array
    """NaN or infinite elements in every leaf of the new state, uint32 [leaves]."""


@dataclass(frozen=True)
class TrainStep:
    """A compiled-once step and what goes with it; made by `make_train_step`."""

    layout: Layout
    """Mesh and groups."""
    abstract_state: TrainState
    """Shapes, dtypes and shardings of the state: what a checkpoint is restored into."""
    leaves: Any
    """How each parameter is divided: a tree of `LeafLayout`s."""
    reduction: str
    """`fast` or `invariant`."""
    jitted: Any
    """`(state, placed batch) -> (state, StepRecord)`; the state is donated."""
    _init: Any

    def init(self, seed: int | jax.Array) -> TrainState:
        """A new state from a seed or a typed key, created directly in its shardings."""
        rng = jax.random.key(seed) if isinstance(seed, int) else seed
        return self._init(rng)

    def place(self, batch: Any) -> Any:
        """A global batch [global batch, ...] of host arrays, on the devices.

        In a job of several processes every process gives the whole batch; a pipeline that
        reads only its own rows uses `layout.place`.
        """
        return self.layout.place(self.layout.split(batch))

    def compiled(self, batch: Any) -> "TrainStep":
        """This step, compiled for placed batches like `batch`; nothing runs."""
        return replace(self, jitted=self.jitted.lower(self.abstract_state, batch).compile())

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, StepRecord]:
        """One update. `state` is donated: use the returned one. `batch` is placed."""
        return self.jitted(state, batch)


def make_train_step(
    init_fn: InitFn,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    groups: int,
    reduction: Literal["fast", "invariant"] = "fast",
    clip_norm: float = 0.0,
    axes: Any = None,
    rules: Mapping[str, str] | None = None,
) -> TrainStep:
    """The training step of a model on a mesh.

    Args:
      init_fn: rng -> parameters, a tree of floating-point arrays.
      loss_fn: (parameters, batch, rng) -> (loss, metrics). It sees one group at a time:
        batch leaves are [global batch / groups, ...], `loss` is the mean over them, a
        float32 scalar, `metrics` a tree of scalars. With `jaxrel.gather` it gathers FSDP
        parameters a layer at a time; without, they are gathered before it runs.
      optimizer: any optax transformation under `fast`; under `invariant` one that works
        element by element (give the clipping of the global norm as `clip_norm`).
      mesh: has axes `data` and `fsdp`; all others are left to the compiler.
      groups: equal parts of the global batch; a multiple of data x fsdp, and under
        `invariant` a power of two. Fixed for the life of a run: noise and gradient norms
        are per group, and groups beyond one per device are gradient accumulation.
      reduction: `fast` is XLA's own; `invariant` gives the same bits on every power of two
        of devices on data x fsdp.
      clip_norm: global norm above which gradients are scaled down; 0 is off.
      axes: logical axis names of every parameter, a tree like the parameters with tuples.
      rules: logical axis name -> mesh axis, for the axes that the compiler handles.

    Raises:
      UsageError: when the combination cannot work, or cannot be exact under `invariant`.
    """
    layout = Layout(mesh, groups, dict(rules or {}))
    how = REDUCTIONS[reduction]
    hooked = gathered_by(loss_fn)
    create = partial(_create, init_fn, optimizer)
    abstract = jax.eval_shape(create, jax.random.key(0))
    leaves = layout.tree(abstract.params, axes, hooked)
    _check(layout, reduction, optimizer, abstract, hooked)
    specs = _state_specs(abstract, leaves, optimizer)
    shardings = jax.tree.map(layout.sharding, specs, is_leaf=lambda s: isinstance(s, P))
    backward = make_backward(loss_fn, hooked, layout, leaves, how)

    step = _make_step(backward, optimizer, how, clip_norm, specs, mesh)
    whole = layout.sharding(P())
    jitted = jax.jit(
        step,
        in_shardings=(shardings, layout.sharding(BATCH_SPEC)),
        out_shardings=(shardings, whole),
        donate_argnums=0,
        compiler_options=how.compiler_options,
    )
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    init = jax.jit(
        create,
        in_shardings=whole,
        out_shardings=shardings,
        # LLVM evaluates the inverse error function of a normal draw otherwise in vectors than
        # one by one, and how many elements are left over follows from the shard's shape.
        compiler_options={"xla_backend_optimization_level": 0} if on_cpu else None,
    )
    with_shardings = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings
    )
    return TrainStep(layout, with_shardings, leaves, reduction, jitted, init)


def _make_step(
    backward: Any, optimizer: Any, how: Reduction, clip_norm: float, specs: Any, mesh: Mesh
) -> Callable[[TrainState, Any], tuple[TrainState, StepRecord]]:
    """What is compiled: (state, placed batch) -> (state, record)."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, StepRecord]:
        grads, report = backward(state.params, batch, state.step, state.rng)
        finite = jnp.isfinite(report.loss) & jnp.isfinite(report.grad_norm)
        zero = opaque_zero(state.step)

        def update(operands: Any) -> Any:
            params, opt_state, grads = operands
            if clip_norm:
                scale = jnp.minimum(1.0, clip_norm / report.grad_norm)
                grads = how.fence(jax.tree.map(lambda g: g * scale, grads), zero)
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            updates = how.fence(updates, zero)
            return optax.apply_updates(params, updates), opt_state, state.step + 1

        def keep(operands: Any) -> Any:
            return operands[0], operands[1], state.step

        params, opt_state, count = lax.cond(
            finite, update, keep, (state.params, state.opt_state, grads)
        )
        new = TrainState(params, opt_state, count, state.rng)
        words, not_finite = sharded_tree_words(new, specs, mesh)
        record = StepRecord(
            report.loss, report.grad_norm, report.group_loss, report.group_grad_norm,
            report.metrics, finite, words, not_finite,
        )  # fmt: skip
        return new, record

    return step


def _create(init_fn: InitFn, optimizer: optax.GradientTransformation, rng: Any) -> TrainState:
    return TrainState.create(init_fn(rng), optimizer, rng)


def _state_specs(abstract: TrainState, leaves: Any, optimizer: Any) -> Any:
    """Partition specs of the whole state: optimizer moments lie where their parameter lies."""
    params = jax.tree.map(lambda leaf: leaf.spec, leaves)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda leaf, spec, param: spec if leaf.shape == param.shape else P(),
        abstract.opt_state,
        params,
        abstract.params,
        transform_non_params=lambda _: P(),
    )
    return TrainState(params, opt_state, P(), P())  # type: ignore[arg-type]


def _check(
    layout: Layout, reduction: str, optimizer: Any, abstract: TrainState, hooked: Any
) -> None:
    """Refuse what cannot be exact under `invariant`; tell what will be gathered at once."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(abstract.params)[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UsageError(f"parameter {name}: got {leaf.dtype}: expected a floating-point dtype")
    if layout.fsdp > 1 and not hooked:
        log.warning(
            "this loss function gathers no layer itself: all parameters are gathered before"
            " it runs, so each device holds a whole copy during the step (see jaxrel.gather)"
        )
    if reduction != "invariant":
        return
    for name, value in (
        ("batch.groups", layout.groups), ("mesh.data", layout.data), ("mesh.fsdp", layout.fsdp),
    ):  # fmt: skip
        if value & (value - 1):
            raise UsageError(f"{name}: got {value}: must be a power of two under invariant")
    mixing = first_mixing_operation(optimizer, abstract.params)
    if mixing:
        raise UsageError(
            f"batch.reduction: got invariant with an optimizer that uses {mixing} on whole"
            " parameters, which is not exact across device counts: use an element-wise"
            " optimizer (clip by clip_norm), or the fast reduction"
        )
