"""FLOPs of contractions from shapes: two for each product that enters a sum.

The formulas are those of XLA's `HloCostAnalysis` (xla/service/hlo_cost_analysis.cc), which counts
a multiplication and an addition, also where the elements are complex or integers.
"""

import re
from collections.abc import Sequence
from math import prod

import numpy as np

from jaxrel.throughput.hlo_text import Array, Instruction


def dot(lhs: Array, result: Array, contracted: Sequence[int]) -> int:
    """FLOPs of a matrix product that sums over the axes `contracted` of `lhs`.

    Raises IndexError for an axis that is not there.
    """
    return 2 * result.size * prod(lhs.dims[axis] for axis in contracted)


def dot_instruction(i: Instruction) -> int:
    """FLOPs of a `dot`, `scaled-dot` or `ragged-dot`.

    Where the ragged axis is summed over, the groups share its elements, so that each element
    enters one group's sum only.
    """
    contracted = i.integers("lhs_contracting_dims")
    flops = dot(i.inputs[0][0], i.results[0], contracted)
    if i.opcode == "ragged-dot" and set(i.integers("lhs_ragged_dims")) & {*contracted}:
        flops //= i.results[0].dims[0]
    return flops


def convolution_instruction(i: Instruction) -> int:
    """FLOPs of a `convolution`."""
    return convolution(i, i.inputs[0][0], i.inputs[1][0], i.results[0])


def convolution(i: Instruction, image: Array, kernel: Array, result: Array) -> int:
    """FLOPs of the convolution of `image` with `kernel`, products with padding left out.

    Window, labels of dimensions and groups are those that the instruction `i` states. Raises
    ValueError, KeyError or IndexError where they do not fit the shapes.
    """
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", i.attributes["dim_labels"])
    if labels is None:
        raise ValueError(f"dim_labels {i.attributes['dim_labels']}")
    image_labels, kernel_labels, result_labels = labels.groups()
    axes = [label for label in image_labels if label.isdigit()]
    products = 1
    for place, axis in enumerate(axes):
        products *= taps(
            image.dims[image_labels.index(axis)],
            kernel.dims[kernel_labels.index(axis)],
            result.dims[result_labels.index(axis)],
            *_window(i, place),
        )
    groups = int(i.attributes.get("feature_group_count", 1))
    batch_groups = int(i.attributes.get("batch_group_count", 1))
    batch = image.dims[image_labels.index("b")] // batch_groups
    features = image.dims[image_labels.index("f")] // groups
    return 2 * batch * features * result.dims[result_labels.index("f")] * products


def _window(i: Instruction, place: int) -> tuple[int, int, int, int]:
    """Stride, low padding, and dilations of image and kernel along one spatial dimension."""

    def part(key: str, otherwise: str) -> int:
        found = re.search(rf"\b{key}=([\dx_-]+)", i.attributes["window"])
        return int(found[1].split("x")[place].split("_")[0] if found else otherwise)

    return part("stride", "1"), part("pad", "0"), part("lhs_dilate", "1"), part("rhs_dilate", "1")


def taps(size: int, kernel: int, out: int, stride: int, low: int, base: int, window: int) -> int:
    """Pairs of an output and a kernel element, along one axis, that meet an element of the input.

    `low` is its padding, `base` and `window` the dilations of input and kernel.
    """
    short, long = sorted([(kernel, window), (out, stride)])
    reached = np.arange(long[0], dtype=np.int64) * long[1] - low
    found = 0
    for i in range(short[0]):
        at = reached + i * short[1]
        found += int(np.count_nonzero((at >= 0) & (at < size * base) & (at % base == 0)))
    return found
