"""Does an optimizer work element by element?

Only then is its update on a shard the same as on the whole parameter, bit for bit, and
only then can a run with it be called `invariant`.
"""

from typing import Any

import jax
import optax

# Primitives whose every output element depends on one element of each operand.
_ELEMENTWISE = frozenset(
    """abs add add_any and atan2 broadcast_in_dim cbrt ceil clamp convert_element_type copy cos
    copy_p div eq erf erf_inv exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p
    logistic lt max min mul ne neg nextafter not optimization_barrier or pow real reduce_precision
    rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square squeeze stop_gradient sub tan tanh xor""".split()
)
_CALLS = frozenset(
    "pjit jit closed_call core_call custom_jvp_call custom_vjp_call remat cond".split()
)


def first_mixing_operation(optimizer: optax.GradientTransformation, params: Any) -> str | None:
    """The first operation of the update that mixes elements of a parameter, or None.

    Operations on scalars (step counts, schedules) are free. `params` may be abstract.
    """

    def update(grads: Any, params: Any) -> Any:
        return optimizer.update(grads, optimizer.init(params), params)

    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return _first(jax.make_jaxpr(update)(abstract, abstract).jaxpr)


def _first(jaxpr: Any) -> str | None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        arrays = [v for v in eqn.invars if getattr(v.aval, "ndim", 0) > 0]
        if name in _CALLS:
            inner = jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
            found = [_first(getattr(p, "jaxpr", p)) for p in inner if _is_jaxpr(p)]
            if any(found):
                return next(f for f in found if f)
        elif arrays and (name not in _ELEMENTWISE or _mixes(eqn, arrays)):
            return name
    return None


def _mixes(eqn: Any, arrays: list[Any]) -> bool:
    """A broadcast of an array copies one element to many places: not element by element."""
    return (
        eqn.primitive.name == "broadcast_in_dim" and eqn.outvars[0].aval.size != arrays[0].aval.size
    )


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")
