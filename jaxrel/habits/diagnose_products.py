"""The matrix products of a compiled step, and how long they take alone, in their own shapes."""

import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrel.throughput import contraction
from jaxrel.throughput.custom_calls import estimate
from jaxrel.throughput.hlo_text import Array, Instruction, Module, parse
from jaxrel.throughput.instruction_flops import ARITHMETIC
from jaxrel.throughput.trip_count import trip_count

_DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "s32": "int32", "s8": "int8",
    "u32": "uint32", "u8": "uint8",
}  # fmt: skip
_RUN_S, _RUNS = 0.005, 3
"""A run of one shape lasts at least so long, and there are so many of it each time."""
_TOGETHER, _LARGE = 16, 10**11
"""Products of a round, and FLOPs of a round above which there are fewer."""


@dataclass(frozen=True)
class Product:
    """A product of two arrays: their types, and the axes that are summed over or shared."""

    lhs: Array
    rhs: Array
    result: str
    """dtype, as HLO spells it."""
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @property
    def flops(self) -> int:
        """Two for each product of elements."""
        shared = prod(self.lhs.dims[a] for a in (*self.contracted[0], *self.batch[0]))
        return 2 * self.lhs.size * self.rhs.size // shared

    def __str__(self) -> str:
        return " x ".join(f"{a.dtype}{list(a.dims)}" for a in (self.lhs, self.rhs))


def products(text: str) -> Counter[Product]:
    """The products of one execution of a program on one device, from its optimized HLO.

    Loops count as often as they run, of branches the one with most FLOPs. A convolution, or a
    library call of known FLOPs, stands as one matrix product of the same FLOPs and as many
    columns. What cannot be read, and loops of unknown length, are left out.
    """
    module = parse(text)
    return _computation(module.entry, module, {}) if module.entry else Counter()


def flops(found: Counter[Product]) -> int:
    """FLOPs of all of them."""
    return sum(product.flops * times for product, times in found.items())


def _computation(name: str, module: Module, known: dict[str, Counter[Product]]) -> Counter[Product]:
    if name not in known:
        known[name] = total = Counter[Product]()
        if computation := module.computations.get(name):
            for i in computation.instructions.values():
                try:
                    for inside, times in _inside(i, module, known):
                        for product, n in inside.items():
                            total[product] += n * times
                except (ValueError, KeyError, IndexError):  # damaged text
                    continue
    return known[name]


def _inside(
    i: Instruction, module: Module, known: dict[str, Counter[Product]]
) -> Iterator[tuple[Counter[Product], int]]:
    """What one execution of `i` runs, and how often."""

    def called(*attributes: str) -> list[Counter[Product]]:
        return [_computation(name, module, known) for name in i.called(*attributes)]

    match i.opcode.removesuffix("-start"):
        case "fusion" | "call" | "async":
            yield called("calls", "to_apply", "called_computations")[0], 1
        case "while":
            yield called("body")[0], trip_count(i, module) or 0
        case "conditional":
            branches = called("branch_computations") or [
                *called("true_computation"), *called("false_computation")
            ]  # fmt: skip
            yield max(branches, key=flops), 1
        case "dot":
            yield Counter([_dot(i)]), 1
        case "custom-call":
            found = estimate(i, {})
            if found and found.contraction:
                yield Counter([_gemm(i) or _stand_in(i, found.contraction)]), 1
        case "convolution":
            yield Counter([_stand_in(i, contraction.convolution_instruction(i))]), 1
        case opcode if ARITHMETIC.get(opcode, ("",))[0] == "contraction":
            yield Counter([_stand_in(i, ARITHMETIC[opcode][1](i))]), 1


def _dot(i: Instruction) -> Product:
    return _product(i, "dims", lambda name: i.integers(name) if name in i.attributes else ())


def _gemm(i: Instruction) -> Product | None:
    """A cuBLAS call, which states its axes as a `dot` does."""
    config = i.attributes.get("backend_config", "")
    found = re.search(r'"dot_dimension_numbers"\s*:\s*(\{[^{}]*\})', config)
    if found is None:
        return None
    stated = json.loads(found[1])
    return _product(i, "dimensions", lambda name: tuple(map(int, stated.get(name, ()))))


def _product(i: Instruction, what: str, axes: Callable[[str], tuple[int, ...]]) -> Product:
    """The product of the operands of `i`. Raises IndexError for an axis that is not there."""
    contracted, batch = (
        (axes(f"lhs_{of}_{what}"), axes(f"rhs_{of}_{what}")) for of in ("contracting", "batch")
    )
    product = Product(i.inputs[0][0], i.inputs[1][0], i.results[0].dtype, contracted, batch)
    contraction.dot(product.lhs, i.results[0], contracted[0])
    return product


def _stand_in(i: Instruction, flops: int) -> Product:
    result, (lhs, *_) = i.results[0], i.inputs[0]
    columns = result.dims[-1] if result.dims else 1
    rows = max(1, result.size // columns)
    summed = max(1, round(flops / (2 * rows * columns)))
    left, right = Array(lhs.dtype, (rows, summed)), Array(lhs.dtype, (summed, columns))
    return Product(left, right, result.dtype, ((1,), (0,)))


@dataclass(frozen=True)
class Timed:
    """How long a product takes."""

    product: Product
    times: int
    """In a step."""
    seconds: float
    """Once."""


class Bench:
    """Products, run by all devices at the same time, on random numbers, many in one program.

    Each `run` adds a measurement of every product, so that runs may come by turns with others. Of
    one product at a time operands are held.
    """

    def __init__(self, found: Counter[Product], devices: Sequence[Any]) -> None:
        self._mesh = Mesh(np.array(devices), ("device",))
        self._times = {product: times for product, times in found.items() if times}
        self._programs: dict[Product, _Program] = {}
        self._seconds: dict[Product, list[float]] = {}
        self.failed: dict[Product, str] = {}
        """Why a product could not be run."""

    def run(self, budget_s: float) -> None:
        """Time every product once more, longer those that take most of a step.

        Compilation is not part of the budget.
        """
        known = {t.product: t.seconds * t.times for t in self.timed()}
        of_all = sum(known.values())
        for product in self._times:
            if product in self.failed:
                continue
            try:
                with jax.set_mesh(self._mesh):  # an ambient mesh of other devices would be refused
                    if product not in self._programs:
                        self._programs[product] = _Program(product, self._mesh)
                    share = known[product] / of_all if of_all else 1 / len(self._times)
                    seconds = self._programs[product].seconds(budget_s * share)
                self._seconds.setdefault(product, []).append(seconds)
            except (jax.errors.JaxRuntimeError, TypeError, ValueError, KeyError) as error:
                why = (str(error).splitlines() or [""])[0]
                self.failed[product] = f"{type(error).__name__}: {why}"

    def timed(self) -> list[Timed]:
        """The middle of what was measured of each product; those that failed are left out."""
        return [
            Timed(product, self._times[product], statistics.median(seconds))
            for product, seconds in self._seconds.items()
            if product not in self.failed
        ]


class _Program:
    """A program of one product, again and again."""

    def __init__(self, product: Product, mesh: Mesh) -> None:
        self._product, self._mesh = product, mesh
        self._operands = jax.jit(self._numbers, out_shardings=NamedSharding(mesh, P("device")))
        self._together = max(1, min(_TOGETHER, _LARGE // product.flops))
        self._round_s = 0.0
        one, all_of_it = P("device"), P()
        mapped: Any = jax.shard_map(
            self._repeated,
            mesh=mesh,
            in_specs=(one, one, all_of_it),
            out_specs=one,
            check_vma=False,
        )
        self._compiled = jax.jit(mapped)

    def seconds(self, budget_s: float) -> float:
        """Of one product: the middle of some runs, each long beside the start of a program."""
        lhs, rhs = self._operands()

        def took(rounds: int) -> float:
            start = time.perf_counter()
            jax.block_until_ready(self._compiled(lhs, rhs, np.int32(rounds)))
            return time.perf_counter() - start

        took(1)
        rounds = 1
        while not self._round_s:  # not yet known, roughly
            rounds *= 2
            self._round_s = seconds / rounds if (seconds := took(rounds)) > _RUN_S else 0.0
        rounds = max(1, round(max(_RUN_S, budget_s / (_RUNS + 1)) / self._round_s))
        self._round_s = statistics.median(took(rounds) for _ in range(_RUNS)) / rounds
        return self._round_s / self._together

    def _numbers(self) -> tuple[jax.Array, jax.Array]:
        def random(array: Array, seed: int) -> jax.Array:
            shape, dtype = (self._mesh.size, *array.dims), _DTYPES[array.dtype]
            return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16).astype(dtype)

        return random(self._product.lhs, 0), random(self._product.rhs, 1)

    def _once(self, state: Any, rhs: Any) -> Any:
        lhs, _ = state
        axes, result = (self._product.contracted, self._product.batch), self._product.result
        dtype = jnp.dtype(_DTYPES[result])
        out = lax.dot_general(lhs, rhs, axes, preferred_element_type=dtype)
        # So that no two products are the same, or the compiler does one only.
        nudge = out[(0,) * out.ndim].astype(lhs.dtype)
        return lhs.at[(0,) * lhs.ndim].set(nudge), out

    def _repeated(self, lhs: Any, rhs: Any, rounds: Any) -> Any:
        lhs, rhs = lhs[0], rhs[0]
        _, shape = jax.eval_shape(self._once, (lhs, 0), rhs)

        def some(_: Any, state: Any) -> Any:  # a length that is known needs no look by the host
            return lax.fori_loop(0, self._together, lambda _, s: self._once(s, rhs), state)

        zeros = jnp.zeros(shape.shape, shape.dtype)
        return lax.fori_loop(0, rounds, some, (lhs, zeros))[1][None]
