"""Optimized HLO, read from its text.

`Compiled.as_text()` is JAX's public view of what was compiled. The structured one (`hlo_modules()`)
is private, shows neither shapes nor attributes, and its protobuf needs a schema that JAX does not
ship. The format is XLA's `HloModule::ToString`, with or without `%` and operand types. Lines are
read one by one: what cannot be read is kept by its number and spoils nothing else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

# A quoted string is one token, so that brackets and commas inside it do not count.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
_HEADER = re.compile(r"(ENTRY\s+)?%?([^\s(=]+)\s*(?:\(.*)?\{\s*$")
_NAME = re.compile(r"(ROOT\s+)?%?([^\s=]+)\s+=\s+")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_KEY = re.compile(r"\s*([\w-]+)=")


@dataclass(frozen=True)
class Array:
    """An array type."""

    dtype: str
    """As HLO spells it: f32, bf16, pred."""
    dims: tuple[int, ...]
    """Sizes; of a dynamic dimension, its bound."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.dims)


@dataclass(frozen=True)
class Instruction:
    """One instruction. What it says beyond name and opcode is read when it is asked for.

    The properties raise ValueError, KeyError or IndexError where the text is not as it should be.
    """

    name: str
    opcode: str
    result_text: str = field(repr=False)
    """Type of the result, as written."""
    rest: str = field(repr=False)
    """Operands and attributes, as written, without the parenthesis that opens them."""
    scope: Mapping[str, "Instruction"] = field(repr=False, compare=False)
    """Instructions of the same computation, by name."""

    @cached_property
    def results(self) -> tuple[Array, ...]:
        """Arrays of the result, tuples flattened; of an asynchronous start, the output comes first.

        Where a start's result is ((operands), output, context), the operands are left out.
        """
        text = self.result_text
        if self.opcode.endswith("-start") and text.startswith("(("):
            text = text[_closing(text, 1) + 1 :]
        return _arrays(text)

    @cached_property
    def _end_of_operands(self) -> int:
        return _closing("(" + self.rest, 0) - 1

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands; of a constant or parameter, what stands in the parentheses."""
        fields = _fields(re.sub(r"/\*.*?\*/", "", self.rest[: self._end_of_operands]))
        return tuple(f.split()[-1].removeprefix("%") for f in fields)

    @cached_property
    def inputs(self) -> tuple[tuple[Array, ...], ...]:
        """Arrays of each operand."""
        return tuple(self.scope[name].results for name in self.operands)

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """Attributes by name, as written."""
        found = {}
        for text in _fields(self.rest[self._end_of_operands + 1 :]):
            if key := _KEY.match(text):
                found[key[1]] = text[key.end() :].strip()
        return found

    def integers(self, attribute: str) -> tuple[int, ...]:
        """The integers in an attribute such as `dimensions={0,1}`."""
        return tuple(int(n) for n in re.findall(r"-?\d+", self.attributes[attribute]))

    def called(self, *attributes: str) -> tuple[str, ...]:
        """Names of the computations under the first of `attributes` that is there."""
        text = next((self.attributes[a] for a in attributes if a in self.attributes), "")
        return tuple(re.findall(r"[^\s,%{}]+", text))


@dataclass
class Computation:
    """A computation: its instructions in order, and the lines that could not be read."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""
    """Name of the instruction whose result is the computation's; empty where none is marked."""
    unread: list[str] = field(default_factory=list)
    """The line's number and the reason, in words, for each line that could not be read."""


@dataclass
class Module:
    """A compiled program."""

    computations: dict[str, Computation] = field(default_factory=dict)
    entry: str = ""
    """Name of the computation that runs first; empty when there is none."""
    programs: int = 0
    """Modules in the text: an executable may hold several."""
    replicas: int = 1
    partitions: int = 1

    @property
    def devices(self) -> int:
        """Devices that run the program together."""
        return self.replicas * self.partitions


def parse(text: str) -> Module:
    """The program in `text`. Raises nothing: see `Computation.unread`."""
    module, current = Module(), None
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if current is not None and stripped.startswith("}"):
            current = None
        elif current is not None:
            try:
                _add(current, stripped)
            except ValueError as error:
                current.unread.append(f"line {number}: {error}: {stripped[:80]}")
        elif stripped.startswith("HloModule"):
            module.programs += 1
            module.replicas = _header_number(line, "replica_count")
            module.partitions = _header_number(line, "num_partitions")
        elif header := _HEADER.match(stripped):
            current = module.computations[header[2]] = Computation()
            module.entry = header[2] if header[1] else module.entry
    return module


def _add(computation: Computation, line: str) -> None:
    if not line:
        return
    name = _NAME.match(line)
    if name is None:
        raise ValueError("no instruction")
    end = name.end()
    end = _closing(line, end) + 1 if line[end : end + 1] == "(" else line.find(" ", end)
    opcode = _OPCODE.match(line, end) if end > 0 else None
    if opcode is None:
        raise ValueError("no opcode")
    scope = computation.instructions
    scope[name[2]] = Instruction(
        name[2], opcode[1], line[name.end() : end], line[opcode.end() :], scope
    )
    if name[1]:
        computation.root = name[2]


def _header_number(line: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", line)
    return int(found[1]) if found else 1


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, tuple(int(n.strip().removeprefix("<=")) for n in dims.split(",") if n.strip()))
        for dtype, dims in _ARRAY.findall(text)
        if dtype not in ("token", "opaque")
    )


def _closing(text: str, start: int) -> int:
    """Where the bracket at `start` closes."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if not depth:
            return token.start()
    raise ValueError("a bracket is not closed")


def _fields(text: str) -> list[str]:
    """`text` divided at the commas outside brackets and strings; empty fields left out."""
    fields, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "," and not depth:
            fields.append(text[start : token.start()])
            start = token.end()
    if depth:
        raise ValueError("a bracket is not closed")
    return [f for f in [*fields, text[start:]] if f.strip()]
