"""How much one HLO instruction computes, as XLA's `HloCostAnalysis` has it.

Source: xla/service/hlo_cost_analysis.cc. Every element counts one, whatever the operation, whether
it is floating point or integer.
"""

from collections.abc import Callable, Mapping
from math import prod

from jaxrel.throughput import contraction
from jaxrel.throughput.custom_calls import Figure
from jaxrel.throughput.hlo_text import Instruction

ELEMENTWISE = frozenset(
    "abs add and bitcast-convert ceil clamp compare complex convert count-leading-zeros divide"
    " floor imag is-finite maximum minimum multiply negate not or popcnt real reduce-precision"
    " remainder round-nearest-afz round-nearest-even select shift-left shift-right-arithmetic"
    " shift-right-logical sign stochastic-convert subtract xor".split()
)
TRANSCENDENTAL = frozenset(
    "acos acosh asin asinh atan2 atanh cbrt cosh cosine erf exponential exponential-minus-one log"
    " log-plus-one logistic power rsqrt sine sinh sqrt tan tanh".split()
)
# Names, views and moves of data.
FREE = frozenset(
    "add-dependency after-all all-gather all-to-all bitcast broadcast"
    " collective-broadcast collective-permute concatenate constant copy domain"
    " dynamic-reshape dynamic-slice dynamic-update-slice gather get-dimension-size"
    " get-tuple-element infeed iota opt-barrier optimization-barrier outfeed pad parameter"
    " partition-id ragged-all-to-all recv replica-id reshape reverse rng-get-and-update-state send"
    " set-dimension-size slice transpose tuple".split()
)


def _random(i: Instruction) -> int:
    return sum(array.size for array in i.results)


def _sort(i: Instruction) -> int:
    elements = i.inputs[0][0].size
    return elements * max(elements - 1, 0).bit_length()


def _fft(i: Instruction) -> int:
    logarithms = prod(n.bit_length() - 1 for n in i.integers("fft_length"))
    return 8 * logarithms * i.inputs[0][0].size


def _triangular_solve(i: Instruction) -> int:
    return 2 * i.inputs[0][0].dims[-1] * i.inputs[1][0].size


def _cholesky(i: Instruction) -> int:
    return i.inputs[0][0].dims[-1] * i.inputs[0][0].size // 3


ARITHMETIC: Mapping[str, tuple[Figure, Callable[[Instruction], int]]] = {
    "dot": ("contraction", contraction.dot_instruction),
    "scaled-dot": ("contraction", contraction.dot_instruction),
    "ragged-dot": ("contraction", contraction.dot_instruction),
    "convolution": ("contraction", contraction.convolution_instruction),
    "rng": ("transcendental", _random),
    "rng-bit-generator": ("transcendental", _random),
    "sort": ("elementwise", _sort),
    "fft": ("elementwise", _fft),
    "triangular-solve": ("elementwise", _triangular_solve),
    "cholesky": ("elementwise", _cholesky),
}
"""Figure and formula of operations that do more or less than one thing to each element."""


def _window_size(i: Instruction) -> int:
    window = i.attributes["window"]
    size = window[window.index("size=") + 5 :].split()[0].strip("}")
    return prod(int(n) for n in size.split("x"))


def _scattered(i: Instruction) -> int:
    return i.inputs[len(i.inputs) // 2 + 1][0].size


APPLIED: Mapping[str, Callable[[Instruction], Mapping[str, int]]] = {
    "map": lambda i: {"to_apply": i.results[0].size},
    "reduce": lambda i: {"to_apply": i.inputs[0][0].size - i.results[0].size},
    "reduce-window": lambda i: {"to_apply": (_window_size(i) - 1) * i.results[0].size},
    "scatter": lambda i: {"to_apply": _scattered(i)},
    "select-and-scatter": lambda i: {
        "select": (_window_size(i) - 1) * i.inputs[1][0].size,
        "scatter": i.inputs[1][0].size,
    },
}
"""How often an operation applies the computations that it names, by attribute."""
