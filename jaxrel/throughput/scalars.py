"""Scalars of a program that are known before it runs, and the trip counts that follow."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

Known = Any
"""A NumPy scalar, or None where the value is not known."""

LONGEST = 10**6
"""Trips of a `while` that are followed before giving up."""


def _divide(a: Any, b: Any) -> Any:
    if np.issubdtype(np.asarray(a).dtype, np.integer):
        return None if b == 0 else np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
    return a / b


def _same(x: Any) -> Any:
    return x


_RULES: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _divide, "neg": np.negative,
    "max": np.maximum, "min": np.minimum, "rem": np.fmod, "abs": np.abs, "sign": np.sign,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or,
    "not": np.invert, "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: cases[int(which)],
    "convert_element_type": _same, "broadcast_in_dim": _same, "reshape": _same,
    "squeeze": _same, "copy": _same, "stop_gradient": _same,
}  # fmt: skip


def closed_jaxpr(jaxpr: Any) -> ClosedJaxpr:
    """A jaxpr with its constants, where an equation may hold one without any."""
    return jaxpr if hasattr(jaxpr, "jaxpr") else ClosedJaxpr(jaxpr, ())


def scalar(x: Any) -> Known:
    """The value of a concrete array of no dimensions and an ordinary dtype, else None."""
    if (
        getattr(x, "shape", ()) != ()
        or getattr(getattr(x, "dtype", None), "kind", "i") not in "biuf"
    ):
        return None
    return np.asarray(x)[()]


class Values:
    """The known scalars of one jaxpr."""

    def __init__(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Known]) -> None:
        pairs = [*zip(jaxpr.constvars, map(scalar, consts), strict=True)]
        pairs += zip(jaxpr.invars, inputs, strict=True)
        self._of = {var: value for var, value in pairs if value is not None}

    def __getitem__(self, atom: Any) -> Known:
        return scalar(atom.val) if isinstance(atom, Literal) else self._of.get(atom)

    def learn(self, eqn: Any) -> None:
        """Take in what an equation makes of known scalars."""
        inputs = [self[x] for x in eqn.invars]
        rule = _RULES.get(eqn.primitive.name)
        if eqn.primitive.name == "jit":
            made = evaluate(eqn.params["jaxpr"], inputs)
        elif rule and inputs and all(x is not None for x in inputs):
            made = [rule(*inputs)]
        else:
            return
        for var, value in zip(eqn.outvars, made, strict=True):
            if value is not None and var.aval.shape == ():
                self._of[var] = np.asarray(value).astype(var.aval.dtype)[()]


def evaluate(closed: ClosedJaxpr, inputs: Sequence[Known]) -> list[Known]:
    """The outputs of a jaxpr, as far as its inputs make them known."""
    values = Values(closed.jaxpr, closed.consts, inputs)
    for eqn in closed.jaxpr.eqns:
        values.learn(eqn)
    return [values[x] for x in closed.jaxpr.outvars]


def trip_count(eqn: Any, inputs: Sequence[Known]) -> int | None:
    """How often the body of a `while` runs; None where that depends on what is not known."""
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    of_cond, of_body = list(inputs[:first]), list(inputs[first : first + second])
    carry = list(inputs[first + second :])
    counter, body = _what_decides(cond, first, body, second)
    for trips in range(LONGEST + 1):
        (go_on,) = evaluate(cond, of_cond + carry)
        if go_on is None:
            return None
        if not go_on:
            return trips
        made = iter(evaluate(body, of_body + carry))
        carry = [next(made) if used else None for used in counter]
    return None


def _what_decides(
    cond: ClosedJaxpr, first: int, body: ClosedJaxpr, second: int
) -> tuple[list[bool], ClosedJaxpr]:
    """Which of the carried values the condition needs, and the body that makes only them."""
    used = dce_jaxpr(cond.jaxpr, [True])[1][first:]
    while True:
        small, needs = dce_jaxpr(body.jaxpr, used, instantiate=True)
        wider = [a or b for a, b in zip(used, needs[second:], strict=True)]
        if wider == used:
            return used, ClosedJaxpr(small, body.consts)
        used = wider
