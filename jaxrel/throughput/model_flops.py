"""Model FLOPs: what the mathematics of a program costs, read from its jaxpr.

Nothing is compiled and nothing runs. A program is traced, what it does not need is dropped, and
its equations are added up, each loop as often as it turns.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from threading import RLock
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.extend.core.primitives import remat_p
from jax.interpreters.partial_eval import dce_jaxpr

from jaxrel.exit_codes import UsageError
from jaxrel.throughput.estimators import Estimator
from jaxrel.throughput.hardware_flops import HasText, hardware_flops
from jaxrel.throughput.scalars import closed_jaxpr
from jaxrel.throughput.tally import Tally, Uncounted
from jaxrel.throughput.walk import Walk

__all__ = ["DEFINITION", "Count", "Uncounted", "count_flops"]

DEFINITION = (
    "model FLOPs: 2 M N K for every dot and convolution (8 where both are complex), padding left"
    " out; each computed once, recomputation under jax.checkpoint undone; a loop as often as it"
    " runs, a cond at its costliest branch; attention as it is computed: what a causal mask"
    " discards counts, unless a share is declared; a lookup of embeddings is no product, the"
    " output projection is; over all devices"
)


@dataclass(frozen=True)
class Count:
    """The cost of one call of a function, over all devices. Operations are exact integers,
    rounded only where a declared share leaves a fraction."""

    contraction: int
    """FLOPs of the dots and convolutions that could be counted."""
    integer: int
    """Operations of contractions among integers, in no other field."""
    elementwise: int
    """One for each element of an elementwise result of whatever dtype; reductions and scatters
    by their additions, sorts by comparisons. Random bits and moving data are free."""
    transcendental: int
    """exp, log, tanh, erf, sin, sqrt, rsqrt, pow, logistic and their like, one an element."""
    by_operation: Mapping[str, int]
    """`contraction` by primitive or kernel."""
    uncounted: tuple[Uncounted, ...]
    """What may hold contractions that are not in the numbers."""
    notes: tuple[str, ...]
    """What the numbers assume."""
    devices: int
    """Of the largest mesh that the program or its arguments name; 1 without one."""
    compile: Callable[[], HasText] = field(repr=False, compare=False)
    """Compiles the program for the devices at hand."""
    definition: str = DEFINITION

    @property
    def model(self) -> int | None:
        """Model FLOPs over all devices; None when something was not counted."""
        return None if self.uncounted else self.contraction

    @cached_property
    def hardware(self) -> int | None:
        """FLOPs of the dots and convolutions that the compiled program executes, over all devices.

        Compiles it, at the first look. None when a part of them is not known;
        `hardware_flops.hardware_flops` says which, and gives the rest.
        """
        return hardware_flops(self.compile()).all_devices.contraction

    @property
    def per_device(self) -> float | None:
        """Model FLOPs of one of `devices`, each with an equal part."""
        return None if self.model is None else self.model / self.devices


def count_flops(
    fn: Callable[..., Any],
    *args: Any,
    scale: Mapping[str, Fraction | float] | None = None,
    estimators: Mapping[str, Estimator] | None = None,
) -> Count:
    """Count what `fn(*args)` computes; `fn` may be jitted, and is traced but not run.

    Arrays in `args` may be `jax.ShapeDtypeStruct`s, at any depth; other leaves (numbers,
    functions) keep their values. So a loop bound given as a Python number is known. Bind keyword
    arguments with `functools.partial`.

    `scale` declares what counts of a scope (`jax.named_scope`, the name of a jitted function or
    of a kernel), in its gradient as well: {"attention": Fraction(1, 2)} halves causal attention,
    {"experts": Fraction(2, 8)} counts 2 active experts of 8 that are all computed. Frozen weights
    need no declaration: gradients that nothing uses are not counted.

    `estimators` gives the contraction FLOPs of an equation by the name of its kernel, foreign
    function or primitive, before any rule of this room.

    Work that several devices repeat inside a `shard_map` counts on each of them.
    Raises UsageError when a name in `scale` is no scope of the program or a share is negative.
    """
    shares = {name: _share(name, share) for name, share in (scale or {}).items()}
    walk = Walk(shares, estimators or {})
    closed, devices = _trace(fn, args)
    arrays, of_arrays = _of_arrays(fn, args)
    total = walk.program(closed, [None] * len(closed.jaxpr.invars))
    if missing := sorted(shares.keys() - walk.scopes):
        raise UsageError(
            f"scale: got {missing[0]!r}: expected a scope of the program:"
            f" {', '.join(sorted(walk.scopes)) or 'it has none'}"
        )

    def compile() -> HasText:
        if isinstance(fn, _Jitted):  # with its own shardings and options
            return fn.lower(*args).compile()
        return jax.jit(of_arrays).lower(*arrays).compile()

    return _count(total, max(devices, total.devices), compile)


def _share(name: str, share: Fraction | float) -> Fraction:
    if not 0 <= share < float("inf"):
        raise UsageError(f"scale: got {share} for {name!r}: expected a number from 0")
    return Fraction(share)


def _count(total: Tally, devices: int, compile: Callable[[], HasText]) -> Count:
    by_operation = {name: round(n) for name, n in sorted(total.contraction.items()) if n}
    return Count(
        contraction=sum(by_operation.values()),
        integer=round(total.integer),
        elementwise=round(total.elementwise),
        transcendental=round(total.transcendental),
        by_operation=by_operation,
        uncounted=tuple(total.uncounted),
        notes=tuple(total.notes),
        devices=devices,
        compile=compile,
    )


def _trace(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[ClosedJaxpr, int]:
    """The jaxpr of `fn(*args)` without what its outputs do not need, and how many devices the
    arguments lie on."""
    # JAX refuses a jitted function with compiler options inside another trace.
    arrays, of_arrays = _of_arrays(fn.__wrapped__ if isinstance(fn, _Jitted) else fn, args)
    with _without_checkpoints():
        closed = jax.make_jaxpr(of_arrays)(*arrays)
    needed, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    shardings = [getattr(x, "sharding", None) for x in arrays]
    devices = max([1, *(s.num_devices for s in shardings if s is not None)])
    return ClosedJaxpr(needed, closed.consts), devices


def _of_arrays(
    fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[list[Any], Callable[..., Any]]:
    """The arrays among the leaves of `args`, and `fn` as a function of these alone."""
    leaves, tree = jax.tree.flatten(args)
    arrays = {i: x for i, x in enumerate(leaves) if _is_array(x)}

    def of_arrays(*values: Any) -> Any:
        given = dict(zip(arrays, values, strict=True))
        held = jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])
        outputs = fn(*held)
        # An NNX module is updated where it stands: what it holds afterwards is an output too.
        return [x for x in jax.tree.leaves((outputs, held)) if isinstance(x, jax.Array)]

    return list(arrays.values()), of_arrays


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


_Jitted: Any = type(jax.jit(lambda: None))

# While it is set, traces are kept apart from those of real runs: JAX has it in their keys.
_undone = jax.make_user_context(False)
_one_at_a_time = RLock()


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """In this thread, `jax.checkpoint` traces to the equations of its function.

    It wraps functions long before they are counted, so it is the primitive that gives way: bound
    inside, it evaluates its jaxpr. What was differentiated before holds recomputation already;
    it stays, to be named as uncounted.
    """
    bind = remat_p.bind

    def inline(*args: Any, jaxpr: Any, differentiated: bool, **params: Any) -> Any:
        if _undone.value and not differentiated:
            return jaxpr_as_fun(closed_jaxpr(jaxpr))(*args)
        return bind(*args, jaxpr=jaxpr, differentiated=differentiated, **params)

    with _one_at_a_time, _undone(True):
        remat_p.bind = inline
        try:
            yield
        finally:
            remat_p.bind = bind
