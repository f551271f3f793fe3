"""What a compiled step executes, counted from its optimized HLO text.

Bodies of loops count as often as they run (`known_trip_count`); of a conditional, the
branch of more operations counts. All figures are per device.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all",
)  # fmt: skip
# Named values and views: nothing runs and no memory moves.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id"
    " opt-barrier all-reduce-done all-gather-done collective-permute-done".split()
)
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
          "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass
class Counts:
    """Figures of one execution of a computation, on one device."""

    collectives: Counter[str] = field(default_factory=Counter)
    """Collectives by kind."""
    collective_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of the arrays that each kind takes in or gives out, whichever is more."""
    kernels: int = 0
    """Operations that run: fusions, products, copies, collectives, library calls."""
    copies: int = 0
    """Bytes moved by operations that only copy or transpose."""
    dot_flops: int = 0
    """Multiplications and additions in matrix products."""

    def add(self, other: "Counts", times: int = 1) -> None:
        """Count `other`, executed `times` times, as well."""
        for kind in other.collectives:
            self.collectives[kind] += times * other.collectives[kind]
            self.collective_bytes[kind] += times * other.collective_bytes[kind]
        self.kernels += times * other.kernels
        self.copies += times * other.copies
        self.dot_flops += times * other.dot_flops


@dataclass(frozen=True)
class _Operation:
    name: str
    shapes: list[tuple[int, tuple[int, ...]]]
    kind: str
    operands: list[str]
    text: str

    @property
    def bytes(self) -> int:
        return sum(size * prod(shape) for size, shape in self.shapes)


def count(text: str) -> Counts:
    """The figures of a compiled module (`compiled.as_text()`).

    Raises ValueError for a loop whose trip count the compiler did not state.
    """
    computations, entry = _parse(text)
    known: dict[str, Counts] = {}

    def of(name: str) -> Counts:
        if name not in known:
            known[name] = _count(computations[name], of, computations)
        return known[name]

    return of(entry)


def _parse(text: str) -> tuple[dict[str, list[_Operation]], str]:
    computations: dict[str, list[_Operation]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif found := _LINE.match(line):
            current.append(_operation(found[1], found[2]))
    return computations, entry


def _operation(name: str, rest: str) -> _Operation:
    end = 0
    if rest.startswith("("):  # a tuple: its type ends where its parenthesis closes
        depths = accumulate((letter == "(") - (letter == ")") for letter in rest)
        end = next(i for i, depth in enumerate(depths) if not depth)
    end = rest.index(" ", end)
    shapes = [
        (_BYTES.get(kind, 0), tuple(int(n) for n in dims.split(",") if n))
        for kind, dims in _ARRAY.findall(rest[:end])
    ]
    kind, _, after = rest[end + 1 :].partition("(")
    operands = re.findall(r"%([\w.\-]+)", after[: after.find(")")])
    return _Operation(name, shapes, kind, operands, after)


def _called(operation: _Operation, key: str) -> list[str]:
    found = re.search(rf"\b{key}=\{{?([^,}}]*(?:, ?%[^,}}]*)*)\}}?", operation.text)
    return re.findall(r"%?([\w.\-]+)", found[1]) if found else []


def _count(
    operations: list[_Operation],
    of: Callable[[str], Counts],
    computations: Mapping[str, list[_Operation]],
) -> Counts:
    counts, sizes = Counts(), {o.name: o for o in operations}
    for o in operations:
        inputs = [sizes[name] for name in o.operands if name in sizes]
        kind = o.kind.removesuffix("-start")
        if kind == "while":
            trips = _TRIPS.search(o.text)
            if trips is None:
                raise ValueError(f"loop {o.name}: the compiled text states no trip count")
            counts.add(of(_called(o, "body")[0]), int(trips[1]))
        elif kind == "conditional":
            branches = _called(o, "branch_computations") or (
                _called(o, "true_computation") + _called(o, "false_computation")
            )
            counts.add(max((of(b) for b in branches), key=lambda c: c.kernels))
        elif kind == "call":
            counts.add(of(_called(o, "to_apply")[0]))
        elif kind not in _FREE:
            counts.kernels += 1
            called = _called(o, "calls") if kind == "fusion" else []
            inner = {x.kind for c in called for x in computations[c]} - _FREE
            if kind in ("copy", "transpose") or (called and inner <= {"copy", "transpose"}):
                counts.copies += o.bytes + sum(i.bytes for i in inputs)
            if kind in _COLLECTIVES:
                counts.collectives[kind] += 1
                counts.collective_bytes[kind] += max(o.bytes, sum(i.bytes for i in inputs))
            for d in [o, *(x for c in called for x in computations[c])]:
                if d.kind == "dot":
                    counts.dot_flops += _dot_flops(d, sizes, called, computations)
    return counts


def _dot_flops(
    dot: _Operation,
    sizes: Mapping[str, _Operation],
    called: list[str],
    computations: Mapping[str, list[_Operation]],
) -> int:
    near = {**sizes} | {x.name: x for c in called for x in computations[c]}
    lhs = near[dot.operands[0]].shapes[0][1]
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.text)
    over = [int(i) for i in contracted[1].split(",") if i] if contracted else []
    return 2 * prod(dot.shapes[0][1]) * prod(lhs[i] for i in over)
