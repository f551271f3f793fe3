"""The digest of `jaxrel.digest`, computed by NumPy on the host and without JAX.

It reads a piece of an array at a time, so that what is on a disk can be checked in little memory.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

# Odd constants of well-known multiplicative hashes (golden ratio, xxHash32, murmur3); one
# row a lane: column index, row index, first and second multiplication.
LANES = (
    (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F),
    (0x165667B1, 0xCC9E2D51, 0x85EBCA6B, 0x1B873593),
)


def leaf_words(
    x: np.ndarray, start: Sequence[int] | None = None, shape: Sequence[int] | None = None
) -> np.ndarray:
    """The digest of one array: uint32 [2]; of a random key, give the key data.

    For a piece of a larger array, `start` is the index of its first element in the whole of
    `shape`: the digests of all pieces sum, modulo 2**32, to that of the whole.
    """
    x = np.asarray(x)
    start, shape = tuple(start or (0,) * x.ndim), tuple(shape or x.shape)
    if not x.size:
        return np.zeros(2, np.uint32)
    if np.iscomplexobj(x):
        x, start, shape = np.stack([np.real(x), np.imag(x)], axis=-1), (*start, 0), (*shape, 2)
    if x.ndim == 0:
        x, start, shape = x[None], (0,), (1,)
    if x.dtype.name in ("int2", "int4", "uint2", "uint4"):
        x = x.astype(np.int8)
    x = np.ascontiguousarray(x)
    words = x.view(f"uint{8 * min(x.dtype.itemsize, 4)}").astype(np.uint32)
    per_element = words.shape[-1] // x.shape[-1]
    column = np.arange(words.shape[-1], dtype=np.uint64) + start[-1] * per_element
    row, stride = np.zeros(words.shape[:-1], np.uint64), 1
    for axis in reversed(range(words.ndim - 1)):
        index = (np.arange(words.shape[axis], dtype=np.uint64) + start[axis]) & 0xFFFFFFFF
        index = index * np.uint64(stride & 0xFFFFFFFF)
        row += index.reshape(-1, *(1,) * (words.ndim - 2 - axis))
        stride *= shape[axis]
    words = words.reshape(-1, words.shape[-1])
    column, row = column.astype(np.uint32)[None, :], row.astype(np.uint32).reshape(-1, 1)
    return np.stack([_lane(words, column, row, lane) for lane in LANES])


def _lane(words: np.ndarray, column: np.ndarray, row: np.ndarray, lane: Sequence[int]) -> Any:
    c, r, m1, m2 = (np.uint32(x) for x in lane)
    h = column * c + row * r
    h ^= words
    h *= m1
    h ^= h >> np.uint32(15)
    h *= m2
    return np.sum(h, dtype=np.uint32)


def pieces(shape: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Slices that cut an array of `shape` into pieces of at most `limit` elements, in order."""
    sides, left = [], max(limit, 1)
    for size in reversed(shape):
        sides.append(max(1, min(size, left)))
        left //= sides[-1]
    sides.reverse()
    starts = [range(0, size, side) for size, side in zip(shape, sides, strict=True)]
    for corner in product(*starts):
        ends = zip(corner, sides, shape, strict=True)
        yield tuple(slice(a, min(a + side, size)) for a, side, size in ends)


def as_hex(words: Any) -> str:
    """A leaf's digest as it is recorded: 16 hex digits."""
    return f"{int(words[0]):08x}{int(words[1]):08x}"


def combine(kinds: Mapping[str, str], digests: Mapping[str, str]) -> str:
    """The whole tree's digest from its leaves' kinds and digests by path: 32 hex digits.

    A leaf's kind is its `dtype (shape)`, as `kind` gives it.
    """
    lines = [f"{path} {kinds[path]} {digests[path]}\n" for path in sorted(kinds)]
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def kind(dtype: str, shape: Sequence[int]) -> str:
    """What `combine` wants to know of a leaf."""
    return f"{dtype} {tuple(shape)}"
