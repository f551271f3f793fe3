"""What a device does in an operation of a trace: compute, talk to other devices, or neither.

A trace names operations as the compiled program does, and JAX names a collective after its
primitive (`psum.7`), a fusion after anything. So the whole instruction decides where the event's
name holds it (TPU), then the program's text, then the name alone.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxrel.throughput.hlo_text import Instruction, Module, parse

Kind = Literal["compute", "communication", "callback", "other"]
"""`callback`: the host computes. `other`: copies, infeed, outfeed, and control flow, which spans
operations of its own."""

_COLLECTIVES = (
    "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|"
    "collective-permute|collective-broadcast"
)
_COMMUNICATION = re.compile(rf"(?:{_COLLECTIVES}|send|recv)(?:-start|-done)?")
_OTHER = re.compile(
    "while|conditional|call|copy(?:-start|-done)?|infeed|outfeed|async-(?:start|update|done)"
)
_CONTRACTIONS = {"dot", "convolution"}
# Told by what they call, which an event does not show.
_CALLING = {"fusion", "call", "async-start", "async-update", "async-done"}
_SEPARATE = {"while", "conditional", "custom-call"}
# Names that the compiler and JAX give, with `-` for `_`.
_COMMUNICATION_NAME = re.compile(
    rf"(?:{_COLLECTIVES}|async-collective-(?:start|done)|send|recv|psum|pmax|pmin|ppermute|"
    r"pbroadcast)(?![a-z])(?!.*fusion)"
)
_CALLBACK_NAME = re.compile("(?:pure|io|debug)-(?:callback|print)")
# Kernels and copies that a GPU trace names itself; AMD's library kept the names of NVIDIA's.
_GPU_COLLECTIVE = re.compile("nccl|nvshmem", re.IGNORECASE)
_GPU_COPY = re.compile("Mem(?:cpy|set)", re.IGNORECASE)


@dataclass(frozen=True)
class Program:
    """Kinds of the operations of one compiled program."""

    name: str
    """The module's, as `hlo_module` in a trace."""
    kinds: Mapping[str, Kind]
    """By the name of the instruction."""


def read_program(text: str) -> Program:
    """The kinds in an optimized program's text (`Compiled.as_text()`); where a line of it cannot be
    read, by the name alone."""
    module = parse(text)
    name = re.search(r"HloModule ([^\s,]+)", text)
    kinds: dict[str, Kind] = {
        instruction.name: _kind(instruction, module)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    }
    return Program(name[1] if name else "", kinds)


def operation_name(name: str) -> str:
    """The instruction that an event names: a TPU gives all of it, `%dot.1 = f32[8] dot(...)`."""
    return name.partition(" = ")[0].strip().removeprefix("%")


def kind_of(name: str, program: Program | None) -> Kind:
    """What the operation `name` of a trace is; `program` is the one it belongs to, if known."""
    short = operation_name(name)
    if short != name:
        module = parse(f"HloModule event\nENTRY %event () -> f32[] {{\n{name}\n}}\n")
        for instruction in module.computations["event"].instructions.values():
            if instruction.opcode not in _CALLING:
                return _kind(instruction, module)
    if program and (known := program.kinds.get(short) or program.kinds.get(_bare(short))):
        return known
    return _kind_by_name(short)


def kernel_kind(name: str, operation: str | None, program: Program | None) -> Kind:
    """What a GPU's kernel or copy `name` is; `operation` launched it, None where not known."""
    if _GPU_COLLECTIVE.search(name):
        return "communication"
    launched_by = kind_of(operation, program) if operation else "compute"
    if launched_by == "communication":  # a permutation may be a copy between devices
        return launched_by
    return "other" if _GPU_COPY.match(name) else "compute"


def _bare(name: str) -> str:
    """Without the parts of an operation that a trace tells apart: `x.call-start`, `x.done`."""
    return re.sub(r"\.(?:call-)?(?:start|done)$", "", name)


def _kind_by_name(name: str) -> Kind:
    plain = name.replace("_", "-")
    if _COMMUNICATION_NAME.match(plain):
        return "communication"
    if _CALLBACK_NAME.match(plain):
        return "callback"
    return "other" if _OTHER.fullmatch(re.sub(r"[.\d]+$", "", plain)) else "compute"


def _kind(instruction: Instruction, module: Module) -> Kind:
    try:
        return _kind_by_opcode(instruction, module)
    except (ValueError, KeyError, IndexError):  # a line that is not as it should be
        return _kind_by_name(instruction.name)


def _kind_by_opcode(instruction: Instruction, module: Module) -> Kind:
    opcode = instruction.opcode
    if opcode in ("send", "send-done", "recv", "recv-done"):
        to_host = instruction.attributes.get("is_host_transfer") == "true"
        return "callback" if to_host else "communication"
    if _COMMUNICATION.fullmatch(opcode):
        return "communication"
    if opcode == "custom-call":
        target = instruction.attributes.get("custom_call_target", "")
        return "callback" if "callback" in target else "compute"
    if opcode in ("async-update", "async-done"):
        return _kind_by_opcode(instruction.scope[instruction.operands[0]], module)
    if opcode in ("fusion", "async-start", "call"):
        inside = _opcodes(instruction, module)
        communicates = any(map(_COMMUNICATION.fullmatch, inside))
        if opcode == "call":  # on CPU often one kernel, with no operations of its own in the trace
            return "other" if communicates or inside & _SEPARATE else "compute"
        # A fusion that also contracts hides its own communication.
        if communicates and not inside & _CONTRACTIONS:
            return "communication"
        return "compute" if opcode == "fusion" else "other"
    return "other" if _OTHER.fullmatch(opcode) else "compute"


def _opcodes(instruction: Instruction, module: Module) -> set[str]:
    """Opcodes of the computations that an instruction calls, theirs included."""
    found: set[str] = set()
    for name in instruction.called("calls", "to_apply"):
        if computation := module.computations.get(name):
            for inner in computation.instructions.values():
                found |= {inner.opcode} | _opcodes(inner, module)
    return found
