"""How often a while loop of compiled HLO runs its body."""

import re
from typing import NamedTuple

from jaxrel.throughput.hlo_text import Instruction, Module

_KNOWN = re.compile(r'"known_trip_count"\s*:\s*\{\s*"n"\s*:\s*"?(\d+)')
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


class _Value(NamedTuple):
    """An integer: `offset`, plus element `carried` of the loop's state unless that is None."""

    carried: int | None
    offset: int


_Arguments = tuple[_Value | None, ...]


def trip_count(loop: Instruction, module: Module) -> int | None:
    """Times that the `while` instruction `loop` runs its body, or None when the text does not say.

    The compiler states it (`known_trip_count`) where it could work it out. Otherwise a loop is
    understood that compares a counter with a constant, starts it from a constant and adds a
    constant in each round. Raises KeyError, IndexError or ValueError on malformed text.
    """
    if stated := _KNOWN.search(loop.attributes.get("backend_config", "")):
        return int(stated[1])
    comparison = _comparison(_root(loop.called("condition")[0], module), None, module)
    if comparison is None:
        return None
    counter, direction, limit = comparison
    next_state = _root(loop.called("body")[0], module)
    state = loop.scope[loop.operands[0]]
    if next_state.opcode != "tuple" or state.opcode != "tuple":
        return None
    start = _value(state.scope[state.operands[counter]], (), module)
    after = _value(next_state.scope[next_state.operands[counter]], None, module)
    if start is None or start.carried is not None or after is None or after.carried != counter:
        return None
    return _rounds(start.offset, after.offset, limit, direction)


def _rounds(start: int, step: int, limit: int, direction: str) -> int | None:
    """Rounds of a counter from `start` by `step` while it compares with `limit`."""
    if direction in ("GT", "GE"):  # downwards is upwards seen in a mirror
        start, step, limit, direction = -start, -step, -limit, _MIRRORED[direction]
    distance = limit - start + (direction == "LE")
    if direction == "NE":
        return distance // step if step and not distance % step and distance // step >= 0 else None
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None


def _root(computation: str, module: Module) -> Instruction:
    found = module.computations[computation]
    return found.instructions[found.root]


def _comparison(
    i: Instruction, arguments: _Arguments | None, module: Module
) -> tuple[int, str, int] | None:
    """Counter's place in the loop's state, direction and limit of the condition `i`."""
    if i.opcode in ("fusion", "call"):
        inner = _root(i.called("calls", "to_apply")[0], module)
        return _comparison(inner, _operands(i, arguments, module), module)
    if i.opcode != "compare":
        return None
    left, right = _operands(i, arguments, module)
    direction = i.attributes["direction"]
    if left is not None and left.carried is None:
        left, right, direction = right, left, _MIRRORED.get(direction, direction)
    if left is None or right is None or left.carried is None or right.carried is not None:
        return None
    if direction not in _MIRRORED:
        return None
    return left.carried, direction, right.offset - left.offset


def _operands(i: Instruction, arguments: _Arguments | None, module: Module) -> _Arguments:
    return tuple(_value(i.scope[name], arguments, module) for name in i.operands)


def _value(i: Instruction, arguments: _Arguments | None, module: Module) -> _Value | None:
    """What is known of `i`; `arguments` are its computation's, None where that is the loop's."""
    match i.opcode:
        case "constant":
            literal = i.operands[0]
            return _Value(None, int(literal)) if re.fullmatch(r"-?\d+", literal) else None
        case "parameter":
            place = int(i.operands[0])
            return arguments[place] if arguments and place < len(arguments) else None
        case "get-tuple-element":
            of_state = arguments is None and i.scope[i.operands[0]].opcode == "parameter"
            return _Value(int(i.attributes["index"]), 0) if of_state else None
        case "copy" | "convert" | "bitcast" | "reshape":
            return _value(i.scope[i.operands[0]], arguments, module)
        case "fusion" | "call":
            inner = _root(i.called("calls", "to_apply")[0], module)
            return _value(inner, _operands(i, arguments, module), module)
        case "add" | "subtract":
            left, right = _operands(i, arguments, module)
            if left is None or right is None or None not in (left.carried, right.carried):
                return None
            if i.opcode == "add":
                carried = right.carried if left.carried is None else left.carried
                return _Value(carried, left.offset + right.offset)
            return (
                _Value(left.carried, left.offset - right.offset) if right.carried is None else None
            )
    return None
