"""A model of your own, in NNX or Linen, as the two functions that jaxrel trains.

Both adapters return `init_fn(rng) -> params` and `loss_fn(params, batch, rng) -> (loss,
metrics)`, where params is a plain nested dict of arrays. They need nothing of jaxrel
beside them; plain functions need no adapter.

A step carries parameters, and nothing else that a model may keep: a module with other
state (running averages, caches) is refused, because it would be trained with that state
frozen at its first value. Random streams are no state here: every call starts them anew
from the key of its step and group.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jaxrel.exit_codes import UsageError

InitFn = Callable[[jax.Array], Any]
LossFn = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module], loss: Callable[[Any, Any], Any]
) -> tuple[InitFn, LossFn]:
    """Adapt an NNX module.

    Args:
      make: builds the module; it is traced, never run on a device by itself.
      loss: (module, batch) -> loss, float32 [], or (loss, dict of scalar metrics).

    Raises:
      UsageError: the module has variables that are neither `nnx.Param` nor random streams.
    """
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    _refuse_state(
        f"{'.'.join(map(str, path))} ({kind})"
        for path, x in nnx.iter_graph(module)
        if (kind := _kind_of_state(x))
    )
    graphdef, _, streams = nnx.split(module, nnx.Param, nnx.RngState)
    leaves, structure = jax.tree.flatten(streams)

    def restart(rng: jax.Array) -> Any:
        """Every stream with a key of its own and its counter at zero."""
        fresh = [
            jax.random.split(jax.random.fold_in(rng, i), leaf.shape)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else jnp.zeros(leaf.shape, leaf.dtype)
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, fresh)

    def init_fn(rng: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(rng)), nnx.Param))

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> tuple[jax.Array, Any]:
        return _with_metrics(loss(nnx.merge(graphdef, params, restart(rng)), batch))

    return init_fn, loss_fn


def from_linen(
    module: linen.Module, loss: Callable[[Any, Any], Any], example: Any
) -> tuple[InitFn, LossFn]:
    """Adapt a Linen module.

    Args:
      module: the module; every random stream that it names draws from the step's key.
      loss: (module, batch) -> loss, float32 [], or (loss, dict of scalar metrics). The
        module that it is given has its parameters bound: call it as in `module(batch["x"])`.
      example: a batch, or anything of its structure with shapes and dtypes; values are
        never read.

    Raises:
      UsageError: the module has collections other than "params".
    """
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), example)

    def variables(rng: jax.Array) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), example)
        return linen.meta.unbox(linen.init(loss, module)(rng, zeros))

    abstract = jax.eval_shape(variables, jax.eval_shape(lambda: jax.random.key(0)))
    _refuse_state(f"{name} (a collection)" for name in abstract if name != "params")

    def init_fn(rng: jax.Array) -> Any:
        return variables(rng)["params"]

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> tuple[jax.Array, Any]:
        return _with_metrics(linen.apply(loss, module)({"params": params}, batch, rngs=rng))

    return init_fn, loss_fn


def _kind_of_state(x: Any) -> str | None:
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return "array"
    carried = isinstance(x, (nnx.Param, nnx.RngState)) or not isinstance(x, nnx.Variable)
    return None if carried else type(x).__name__


def _with_metrics(result: Any) -> tuple[jax.Array, Any]:
    return result if isinstance(result, tuple) else (result, {})


def _refuse_state(names: Iterable[str]) -> None:
    for name in names:
        raise UsageError(
            f"model: {name} is state beside the parameters, which a step does not carry: "
            "use LayerNorm or RMSNorm for BatchNorm, and compute a constant where it is used"
        )
