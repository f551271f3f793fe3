"""Adding up a program: a recursive walk of its jaxpr, with the trip counts of its loops."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.extend.source_info_util import summarize

from jaxrel.throughput.estimators import Estimator, kernel_name, known_estimator
from jaxrel.throughput.operations import cost
from jaxrel.throughput.scalars import LONGEST, Known, Values, closed_jaxpr, trip_count
from jaxrel.throughput.tally import Tally, Uncounted

# Primitives that run one program once, under one of these parameters.
_CALLS = frozenset(
    """call closed_call composite cudnn_fusion custom_jvp_call custom_partitioning
    custom_vjp_call custom_vmap_call jit linear_call remat2 remat_opt run_scoped run_state
    xla_metadata_call""".split()
)
_PROGRAM = ("jaxpr", "call_jaxpr", "fwd_jaxpr", "call", "callee")


@dataclass(frozen=True)
class Place:
    """Where in the program an equation stands."""

    scopes: frozenset[str] = frozenset()
    """Those that it is in, however deep."""
    line: str = "?"
    """Its file, line and function, or those of the call around it."""

    def enter(self, eqn: Any) -> "Place":
        """The place of `eqn`, seen from here."""
        return Place(self.scopes | _names(eqn), summarize(eqn.source_info) or self.line)


@dataclass
class Walk:
    """One count: what is declared of it, and the scopes that it came through."""

    scale: Mapping[str, Fraction]
    """The share of a named scope that counts."""
    estimators: Mapping[str, Estimator]
    scopes: set[str] = field(default_factory=set)

    def program(
        self, closed: ClosedJaxpr, inputs: Sequence[Known], within: Place | None = None
    ) -> Tally:
        """All that a jaxpr computes when it runs once; `within` is where it stands."""
        within = within or Place()
        values = Values(closed.jaxpr, closed.consts, inputs)
        total = Tally()
        for eqn in closed.jaxpr.eqns:
            place = within.enter(eqn)
            entered = place.scopes - within.scopes
            self.scopes |= entered
            share = math.prod(self.scale.get(name, 1) for name in entered)
            known = [values[x] for x in eqn.invars]
            total.add(self._equation(eqn, known, place), share)
            values.learn(eqn)
        return total

    def _equation(self, eqn: Any, known: Sequence[Known], within: Place) -> Tally:
        name = eqn.primitive.name
        estimator = self.estimators.get(kernel_name(eqn)) or known_estimator(eqn)
        if estimator:
            return Tally(contraction={kernel_name(eqn): estimator(eqn)})
        if name in _CALLS:
            return self._call(eqn, known, within)
        if name in _RULES:
            return _RULES[name](self, eqn, known, within)
        return cost(eqn) or _uncounted(eqn, within, "not an operation that this version can count")

    def _call(self, eqn: Any, known: Sequence[Known], within: Place) -> Tally:
        jaxpr = next(eqn.params[name] for name in _PROGRAM if name in eqn.params)
        total = self.program(closed_jaxpr(jaxpr), known, within)
        if eqn.primitive.name == "remat2" and eqn.params["differentiated"]:
            total.add(
                _uncounted(eqn, within, "recomputes; it was differentiated before it was counted")
            )
        placed = [getattr(s, "num_devices", 1) for s in eqn.params.get("in_shardings", ())]
        total.devices = max([total.devices, *placed])
        return total

    def _scan(self, eqn: Any, known: Sequence[Known], within: Place) -> Tally:
        consts = list(known[: _constants(eqn)])
        inputs = consts + [None] * (len(known) - len(consts))
        total = Tally()
        total.add(self.program(eqn.params["jaxpr"], inputs, within), eqn.params["length"])
        return total

    def _while(self, eqn: Any, known: Sequence[Known], within: Place) -> Tally:
        trips = trip_count(eqn, known)
        if trips is None:
            reason = f"its trips depend on data, or are more than {LONGEST}"
            return _uncounted(eqn, within, reason)
        total = Tally()
        for part, times in (("cond", trips + 1), ("body", trips)):
            closed, fixed = eqn.params[f"{part}_jaxpr"], eqn.params[f"{part}_nconsts"]
            first = 0 if part == "cond" else eqn.params["cond_nconsts"]
            carried = len(closed.jaxpr.invars) - fixed
            inputs = [*known[first : first + fixed], *[None] * carried]
            total.add(self.program(closed, inputs, within), times)
        return total

    def _cond(self, eqn: Any, known: Sequence[Known], within: Place) -> Tally:
        index, inputs = known[0], known[1:]
        branches = [self.program(b, inputs, within) for b in eqn.params["branches"]]
        if index is not None:
            return branches[min(max(int(index), 0), len(branches) - 1)]
        worst = max(branches, key=Tally.size)
        for branch in branches:
            worst.mention(branch)
        if any(branch.size() != worst.size() for branch in branches):
            worst.notes[f"cond: the branch with most FLOPs is counted ({within.line})"] = None
        return worst

    def _reduce(self, eqn: Any, known: Sequence[Known], within: Place) -> Tally:
        """A reduction by a function: called once less for each output than elements go in."""
        elements, outputs = (math.prod(v.aval.shape) for v in (eqn.invars[0], eqn.outvars[0]))
        calls = elements - outputs
        if "window_dimensions" in eqn.params:
            calls = outputs * (math.prod(eqn.params["window_dimensions"]) - 1)
        function, total = closed_jaxpr(eqn.params["jaxpr"]), Tally()
        total.add(self.program(function, [None] * len(function.jaxpr.invars), within), calls)
        return total

    def _shard_map(self, eqn: Any, known: Sequence[Known], within: Place) -> Tally:
        mesh = eqn.params["mesh"]
        # Of a shard_map inside another, the axes that it adds.
        shards = math.prod(mesh.shape[axis] for axis in eqn.params["newly_manual_axes"])
        total = Tally(devices=mesh.size)
        total.add(self.program(closed_jaxpr(eqn.params["jaxpr"]), known, within), shards)
        return total

    def _pallas(self, eqn: Any, known: Sequence[Known], within: Place) -> Tally:
        name, estimate = kernel_name(eqn), eqn.params["cost_estimate"]
        if estimate is not None:
            total = Tally(
                contraction={name: estimate.flops},
                transcendental=Fraction(estimate.transcendentals),
            )
            total.notes[f"{name}: the kernel's own cost estimate, all its FLOPs"] = None
            return total
        grid = eqn.params["grid_mapping"].grid
        if not all(isinstance(n, int) for n in grid):
            return _uncounted(eqn, within, "its grid depends on data, and it has no cost estimate")
        body, total = closed_jaxpr(eqn.params["jaxpr"]), Tally()
        unknown = [None] * len(body.jaxpr.invars)
        total.add(self.program(body, unknown, within), math.prod(grid))
        total.notes[f"{name}: no cost estimate; its body, for each cell of its grid"] = None
        return total


# Primitives with programs inside that run other than once.
_RULES = {
    "scan": Walk._scan,
    "while": Walk._while,
    "cond": Walk._cond,
    "reduce": Walk._reduce,
    "reduce_window": Walk._reduce,
    "shard_map": Walk._shard_map,
    "pallas_call": Walk._pallas,
}


def _constants(eqn: Any) -> int:
    """How many inputs of a scan are the same at every turn; JAX has changed how it says so."""
    p = eqn.params
    return p["num_consts"] if "num_consts" in p else len(p["ft_in"].unpack()[0])


def _names(eqn: Any) -> set[str]:
    """The scopes that an equation is in: `jax.named_scope`, jitted functions, kernels.

    A name stack reads as "transpose(jvp(outer))/inner": the names of transformations do no harm.
    """
    names = set(re.findall(r"[^/()]+", str(eqn.source_info.name_stack)))
    if eqn.primitive.name == "jit":
        names.add(eqn.params["name"])
    elif eqn.primitive.name == "pallas_call" or known_estimator(eqn):
        names.add(kernel_name(eqn))
    return names


def _uncounted(eqn: Any, within: Place, reason: str) -> Tally:
    return Tally(uncounted={Uncounted(kernel_name(eqn), reason, within.line): None})
