"""What a compiled program executes, counted from its optimized HLO.

The rules for a single instruction are those of XLA's `HloCostAnalysis`
(xla/service/hlo_cost_analysis.cc). Three things differ, because they are wrong for a program that
runs: a loop counts as often as it runs, known library calls are counted, and a reduction across
devices counts the additions it takes. What XLA's rules would give is counted beside it, so that
each difference has a reason and an amount.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from jaxrel.throughput.custom_calls import FIGURES, Estimator, Figure, estimate
from jaxrel.throughput.hlo_text import Instruction, Module, parse
from jaxrel.throughput.instruction_flops import (
    APPLIED,
    ARITHMETIC,
    ELEMENTWISE,
    FREE,
    TRANSCENDENTAL,
)
from jaxrel.throughput.trip_count import trip_count


@dataclass(frozen=True)
class Flops:
    """Operations by kind; None where something that may hold such operations was not counted."""

    contraction: int | None
    """2 for each product that enters a sum: dots and convolutions, those of libraries included."""
    elementwise: int | None
    """1 for each element of other arithmetic, comparison, conversion, sort or reduction."""
    transcendental: int | None
    """1 for each element of exp, log, tanh, rsqrt and the like, and for each random number."""
    collective: float | None
    """Additions of all-reduce and reduce-scatter: elements x (n - 1) / n among n devices.

    This is the least a device can do, when each sums its share. XLA counts one an element of an
    all-reduce, none of a reduce-scatter.
    """


@dataclass(frozen=True)
class HardwareFlops:
    """What one execution of a compiled program computes."""

    per_device: Flops
    devices: int
    """Devices that run the program together: partitions x replicas."""
    by_operation: Mapping[str, float]
    """Operations per device by HLO opcode, a library call by its target; what was counted only."""
    uncounted: tuple[str, ...]
    """What was not counted, by name, and why."""
    notes: tuple[str, ...]
    """What the figures assume."""
    by_xla_rules: float
    """FLOPs per device that XLA's own rules give for the same text."""
    reasons: Mapping[str, float]
    """Why the FLOPs here differ from `by_xla_rules`: FLOPs per device by reason."""

    @property
    def all_devices(self) -> Flops:
        """The figures of all devices together: per device x devices."""
        every = {name: getattr(self.per_device, name) for name in FIGURES}
        return Flops(**{k: None if v is None else v * self.devices for k, v in every.items()})


class HasText(Protocol):
    """A `jax.stages.Compiled`, as far as it is used here."""

    def as_text(self) -> str | None:
        """The optimized HLO."""
        ...


def hardware_flops(
    compiled: HasText, custom_calls: Mapping[str, Estimator] | None = None
) -> HardwareFlops:
    """What `compiled`, a `jax.stages.Compiled`, executes each time it is called.

    `custom_calls` has estimators for kernels of your own, by their target's name. Never raises:
    what cannot be read or is not known is named in `uncounted`, and the figures that it may belong
    to are None.
    """
    try:
        return count_hlo(compiled.as_text() or "", custom_calls)
    except Exception as error:  # a metric may fail without stopping the run
        tally = _Tally()
        tally.leave_out(f"the program: no HLO text: {type(error).__name__}: {error}")
        return _result(tally, 1)


def count_hlo(text: str, custom_calls: Mapping[str, Estimator] | None = None) -> HardwareFlops:
    """As `hardware_flops`, from the text of one program's optimized HLO."""
    module = parse(text)
    if module.programs > 1 or not module.entry:
        what = f"{module.programs} programs" if module.programs > 1 else "no entry computation"
        tally = _Tally()
        tally.leave_out(f"the program: {what} in the HLO text")
        return _result(tally, 1)
    return _result(_Walk(module, custom_calls or {}).computation(module.entry), module.devices)


@dataclass
class _Tally:
    """Operations of one execution of something."""

    counts: dict[tuple[Figure, str], float] = field(default_factory=dict)
    """By figure and operation."""
    unknown: set[Figure] = field(default_factory=set)
    # Dictionaries serve as sets that keep their order.
    uncounted: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    by_xla_rules: float = 0
    reasons: dict[str, float] = field(default_factory=dict)
    """They add up to `flops` less `by_xla_rules`."""

    def add(self, other: "_Tally", times: int = 1, *, for_xla: int | None = None) -> None:
        """Count `other`, executed `times` times; XLA counts it `for_xla` times, else as often."""
        for_xla = times if for_xla is None else for_xla
        for key, n in other.counts.items():
            self.count(*key, n * times)
        for reason, n in other.reasons.items():
            self.because(reason, n * for_xla)
        self.by_xla_rules += other.by_xla_rules * for_xla
        self.unknown |= other.unknown
        self.uncounted |= other.uncounted
        self.notes |= other.notes

    def count(self, figure: Figure, operation: str, n: float) -> None:
        """Count `n` operations."""
        self.counts[figure, operation] = self.counts.get((figure, operation), 0) + n

    def because(self, reason: str, flops: float) -> None:
        """Give the reason for `flops` more than XLA's rules give."""
        self.reasons[reason] = self.reasons.get(reason, 0) + flops

    def leave_out(self, what: str, unknown: Iterable[Figure] = FIGURES) -> None:
        """Name something that is not counted and may hold the figures `unknown`."""
        self.uncounted[what] = None
        self.unknown |= {*unknown}

    @property
    def flops(self) -> float:
        """What XLA calls FLOPs: all but transcendentals."""
        return sum(n for (figure, _), n in self.counts.items() if figure != "transcendental")

    @property
    def holds(self) -> set[Figure]:
        """Figures that are, or may be, more than zero."""
        held: set[Figure] = {key[0] for key, n in self.counts.items() if n}
        return held | self.unknown


def _one(figure: Figure, operation: str, n: float) -> _Tally:
    tally = _Tally()
    tally.count(figure, operation, n)
    tally.by_xla_rules = tally.flops
    return tally


def _result(tally: _Tally, devices: int) -> HardwareFlops:
    def figure(name: Figure) -> float | None:
        if name in tally.unknown:
            return None
        return sum(n for (figure, _), n in tally.counts.items() if figure == name)

    def whole(name: Figure) -> int | None:
        n = figure(name)
        return None if n is None else int(n)

    operations: dict[str, float] = {}
    for (_, operation), n in tally.counts.items():
        operations[operation] = operations.get(operation, 0) + n
    by_size = sorted(operations.items(), key=lambda item: -item[1])
    return HardwareFlops(
        per_device=Flops(
            contraction=whole("contraction"),
            elementwise=whole("elementwise"),
            transcendental=whole("transcendental"),
            collective=figure("collective"),
        ),
        devices=devices,
        by_operation={operation: n for operation, n in by_size if n},
        uncounted=tuple(tally.uncounted),
        notes=tuple(tally.notes),
        by_xla_rules=tally.by_xla_rules,
        reasons={reason: n for reason, n in tally.reasons.items() if n},
    )


class _Walk:
    """Counts computations of a module, each once."""

    def __init__(self, module: Module, custom_calls: Mapping[str, Estimator]) -> None:
        self.module, self.custom_calls = module, custom_calls
        self.known: dict[str, _Tally] = {}

    def computation(self, name: str) -> _Tally:
        """One execution of the computation `name`."""
        if name in self.known:
            return self.known[name]
        # Found by a computation that, in damaged text, calls itself.
        self.known[name] = _Tally()
        self.known[name].leave_out(f"computation {name}: it calls itself")
        tally = _Tally()
        if name not in self.module.computations:
            tally.leave_out(f"computation {name}: not in the text")
        else:
            computation = self.module.computations[name]
            for line in computation.unread:
                tally.leave_out(line)
            for i in computation.instructions.values():
                try:
                    tally.add(self.instruction(i))
                except Exception as error:  # one instruction must not hide the others
                    why = f"{type(error).__name__}: {error}"
                    tally.leave_out(f"{i.opcode} {i.name}: cannot be read: {why}")
        self.known[name] = tally
        return tally

    def instruction(self, i: Instruction) -> _Tally:
        """One execution of `i`. Raises where the text is damaged."""
        opcode = i.opcode.removesuffix("-start")
        if opcode in FREE or opcode.endswith(("-done", "-update")):
            return _Tally()
        if opcode in ELEMENTWISE:
            return _one("elementwise", opcode, i.results[0].size)
        if opcode in TRANSCENDENTAL:
            return _one("transcendental", opcode, i.results[0].size)
        if opcode in ARITHMETIC:
            figure, formula = ARITHMETIC[opcode]
            return _one(figure, opcode, formula(i))
        if opcode in APPLIED:
            return self.applied(i, APPLIED[opcode](i))
        match opcode:
            case "fusion" | "call" | "async":
                return self.computation(i.called("calls", "to_apply", "called_computations")[0])
            case "while":
                return self.loop(i)
            case "conditional":
                return self.conditional(i)
            case "all-reduce" | "reduce-scatter":
                return self.reduction(i, opcode)
            case "custom-call":
                return self.custom_call(i)
        tally = _Tally()
        tally.leave_out(f"{i.opcode} {i.name}: no rule for this operation")
        return tally

    def applied(self, i: Instruction, times: Mapping[str, int]) -> _Tally:
        """The computations that `i` names under attributes, each applied so many times."""
        tally = _Tally()
        for attribute, n in times.items():
            tally.add(self.computation(i.called(attribute)[0]), n)
        inner, tally.counts = tally.counts, {}
        for (figure, _), n in inner.items():
            tally.count(figure, i.opcode, n)
        return tally

    def loop(self, i: Instruction) -> _Tally:
        body = self.computation(i.called("body")[0])
        condition = self.computation(i.called("condition")[0])
        times = trip_count(i, self.module)
        tally = _Tally()
        tally.add(body, times or 0, for_xla=1)
        tally.add(condition, 0 if times is None else times + 1, for_xla=1)
        if times is None:
            tally.leave_out(f"while {i.name}: trip count unknown", body.holds | condition.holds)
            tally.reasons = {f"while {i.name}: counted once by XLA, not here": -tally.by_xla_rules}
        else:
            reason = f"while {i.name}: counted once by XLA, {times} times here"
            tally.because(reason, (times - 1) * body.flops + times * condition.flops)
        return tally

    def conditional(self, i: Instruction) -> _Tally:
        names = i.called("branch_computations") or (
            i.called("true_computation") + i.called("false_computation")
        )
        branches = {name: self.computation(name) for name in names}
        longest = max(branches, key=lambda name: sum(branches[name].counts.values()))
        tally = _Tally()
        tally.add(branches[longest])
        for branch in branches.values():
            tally.unknown |= branch.unknown
            tally.uncounted |= branch.uncounted
        tally.notes[f"conditional {i.name}: counted as its longest branch, {longest}"] = None
        most = max(branch.by_xla_rules for branch in branches.values())
        reason = f"conditional {i.name}: XLA takes the branch of the most FLOPs by its own rules"
        tally.because(reason, tally.by_xla_rules - most)
        tally.by_xla_rules = most
        return tally

    def reduction(self, i: Instruction, opcode: str) -> _Tally:
        elements = sum(array.size for arrays in i.inputs for array in arrays)
        n = self.participants(i)
        tally = _one("collective", opcode, elements * (n - 1) / n)
        tally.by_xla_rules = elements if opcode == "all-reduce" else 0
        rule = "1 an element" if opcode == "all-reduce" else "nothing"
        reason = f"{opcode}: {rule} for XLA, (n - 1) / n an element among n devices here"
        tally.because(reason, tally.flops - tally.by_xla_rules)
        return tally

    def participants(self, i: Instruction) -> int:
        """Devices that reduce together.

        HLO spells its groups `{{0,1},{2,3}}`, `[groups,members]<=[devices]` or
        `mesh['a'=2,'b'=4] {'b'}`, where an axis may be divided: `'b':(2)2` has 2 members.
        """
        groups = i.attributes["replica_groups"]
        if groups.startswith("["):
            return int(groups[1 : groups.index("]")].split(",")[1])
        if groups.startswith("mesh["):
            mesh, _, rest = groups.partition("]")
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh))
            axes = re.findall(
                r"'(\w+)'(?::\(\d+\)(\d+))?", rest + i.attributes.get("device_ids", "")
            )
            return prod(int(part or sizes[axis]) for axis, part in axes)
        if not groups.startswith("{"):
            raise ValueError(f"replica_groups={groups}")
        members = re.findall(r"\d+", groups.partition("}")[0])
        if not members:
            return self.module.devices
        # With a channel and without global ids, a group of replicas spans all partitions.
        spans = "channel_id" in i.attributes and "use_global_device_ids" not in i.attributes
        return len(members) * (self.module.partitions if spans else 1)

    def custom_call(self, i: Instruction) -> _Tally:
        target = i.attributes["custom_call_target"].strip('"')
        where = f"custom call {target} ({i.name})"
        found = estimate(i, self.custom_calls)
        tally = _Tally(by_xla_rules=-1)  # XLA's mark for what it does not know
        if found is None:
            tally.leave_out(f"{where}: no estimate")
        else:
            figures: dict[Figure, int | None] = {f: getattr(found, f) for f in FIGURES[:3]}
            missing: list[Figure] = [name for name, n in figures.items() if n is None]
            if missing:
                tally.leave_out(f"{where}: {' and '.join(missing)}: no estimate", missing)
            for name, n in figures.items():
                tally.count(name, target, n or 0)
            if found.note:
                tally.notes[f"{where}: {found.note}"] = None
        tally.because(f"custom call {target}: unknown to XLA, which adds -1", tally.flops + 1)
        return tally
