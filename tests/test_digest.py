"""The digest: exact, free of the sharding, and the same on devices and on the host."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrel import digest, digest_host

NARROW = [
    np.dtype(name)
    for name in "bool int8 uint8 int16 uint16 int32 uint32 float16 float32 complex64".split()
] + [
    np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
]
WIDE = [np.dtype(name) for name in "int64 uint64 float64 complex128".split()]
SHAPES = [(), (16,), (0, 3), (3, 0), (8, 16), (2, 4, 1, 2)]


def random_bits(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    """Any bits: NaNs with payloads, infinities and negative zeros among them."""
    size = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
    raw = raw & 1 if dtype == np.bool_ else raw
    return raw.view(dtype).reshape(shape)


def wide(dtype: np.dtype) -> Any:
    return jax.enable_x64(dtype in WIDE)


def on_device(x: Any) -> list[int]:
    return np.asarray(jax.jit(digest.leaf_words)(x)).tolist()


def twin(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return digest_host.leaf_words(np.asarray(x))


def on_host(x: Any) -> list[int]:
    return twin(x).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64", "bool", "int4"])
@pytest.mark.parametrize("limit", [1, 7, 30, 10**6])
def test_pieces_add_up_to_the_whole(dtype: str, limit: int) -> None:
    for shape in [(), (13,), (5, 4, 9), (2, 1, 3, 8)]:
        x = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
        total, seen = np.zeros(2, np.uint32), np.zeros(shape, int)
        for where in digest_host.pieces(shape, limit):
            assert x[where].size <= limit
            total += digest_host.leaf_words(x[where], [s.start for s in where], shape)
            seen[where] += 1
        assert total.tolist() == on_host(x)
        assert (seen == 1).all()


def mesh(data: int, fsdp: int, kind: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices()[: data * fsdp]
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=(kind, kind), devices=devices)


@pytest.mark.core
@pytest.mark.parametrize("dtype", NARROW + WIDE, ids=str)
def test_the_numpy_twin_agrees(dtype: np.dtype) -> None:
    values = [random_bits(shape, dtype) for shape in SHAPES]
    with wide(dtype):
        arrays = [jnp.asarray(value) for value in values]
        assert {array.dtype for array in arrays} == {dtype}
        words = np.asarray(jax.jit(digest.tree_words)(arrays)).tolist()
        assert words == [on_host(value) for value in values]


def test_the_digest_works_outside_jit() -> None:
    value = random_bits((8, 16), np.dtype("float32"))
    assert np.asarray(digest.leaf_words(jnp.asarray(value))).tolist() == on_host(value)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_are_digested_by_their_data(impl: str) -> None:
    for shape in ((), (8,), (2, 4)):
        keys = jax.random.split(jax.random.key(1, impl=impl), shape)
        expected = on_host(np.asarray(jax.random.key_data(keys)))
        assert on_device(keys) == on_host(keys) == expected


@given(
    hnp.arrays(
        st.sampled_from([np.dtype(n) for n in ("uint8", "int16", "float32", "complex64", "bool")]),
        hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4),
    )
)
@settings(max_examples=15, deadline=None)
def test_the_twin_agrees_on_any_array(value: np.ndarray) -> None:
    assert on_device(jnp.asarray(value)) == on_host(value)


@pytest.mark.core
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("devices", [(1, 1), (2, 1), (2, 2), (4, 2), (1, 8)], ids=str)
def test_the_sharding_makes_no_difference(devices: tuple[int, int], kind: AxisType) -> None:
    """Any device count, mesh and assignment of mesh axes to the array's axes."""
    names = [None, "data", "fsdp", ("data", "fsdp"), ("fsdp", "data")]
    specs = [
        spec
        for spec in itertools.product(names, repeat=3)
        if len(used := [n for s in spec if s for n in np.atleast_1d(s)]) == len(set(used))
    ]
    rng = np.random.default_rng([*devices, kind == AxisType.Auto])
    on = mesh(*devices, kind)
    with jax.enable_x64(True):
        values, arrays = [], []
        for dtype in (np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), np.dtype("float64")):
            for pick in rng.choice(len(specs), 3, replace=False):
                values.append(random_bits((8, 16, 8), dtype))
                sharding = NamedSharding(on, PartitionSpec(*specs[pick]))
                arrays.append(jax.device_put(values[-1], sharding))
        words = np.asarray(jax.jit(digest.tree_words)(arrays)).tolist()
    assert words == [on_host(value) for value in values]


def test_sharded_keys() -> None:
    keys = jax.random.split(jax.random.key(0), 16)
    for spec in (PartitionSpec("data"), PartitionSpec(("data", "fsdp")), PartitionSpec()):
        sharded = jax.device_put(keys, NamedSharding(mesh(4, 2), spec))
        assert on_device(sharded) == on_host(keys)


def test_no_shard_leaves_its_device_or_is_copied() -> None:
    """The collectives of the digest move its sums, not the arrays; a pass stores nothing."""
    on = mesh(4, 2)
    specs = [PartitionSpec("data", "fsdp"), PartitionSpec(None, ("data", "fsdp")), PartitionSpec()]
    tree = [jnp.ones((256, 512), kind, device=NamedSharding(on, s)) for s in specs for kind in "fh"]
    whole = NamedSharding(on, PartitionSpec())
    compiled: Any = jax.jit(digest.tree_words, out_shardings=whole).lower(tree).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tree[0].nbytes / 8 / 8
    for line in compiled.as_text().splitlines():
        for collective in ("all-gather(", "all-to-all(", "collective-permute(", "all-reduce("):
            if collective in line:
                shape = line.split("=")[1].split("[")[1].split("]")[0]
                assert np.prod([int(n) for n in shape.split(",") if n]) <= 512, line


@pytest.mark.core
@pytest.mark.parametrize("dtype", NARROW + WIDE, ids=str)
def test_every_flipped_bit_changes_both_words(dtype: np.dtype) -> None:
    value = random_bits((3, 5), dtype)
    before = on_host(value)
    bits = range(8 * value.nbytes) if dtype != np.bool_ else range(0, 8 * value.nbytes, 8)
    for bit in bits:
        raw = bytearray(value.tobytes())
        raw[bit // 8] ^= 1 << bit % 8
        after = on_host(np.frombuffer(bytes(raw), dtype).reshape(value.shape))
        assert after[0] != before[0] and after[1] != before[1], bit


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    place=st.integers(0, 10**6),
    bit=st.integers(0, 31),
)
@settings(max_examples=200, deadline=None)
def test_any_flip_in_any_array_changes_both_words(bits: list[int], place: int, bit: int) -> None:
    value = np.array(bits, np.uint32)
    flipped = value.copy()
    flipped[place % len(bits)] ^= np.uint32(1 << bit)
    before, after = on_host(value.view(np.float32)), on_host(flipped.view(np.float32))
    assert before[0] != after[0] and before[1] != after[1]


def test_order_and_shape_matter() -> None:
    value = random_bits((6, 4), np.dtype("float32"))
    variants = [value, value[::-1], value[:, ::-1], value.T, np.roll(value, 1), value.reshape(4, 6)]
    swapped = value.copy()
    swapped[[0, 3]] = swapped[[3, 0]]
    assert len({tuple(on_host(v)) for v in [*variants, swapped]}) == len(variants) + 1


def test_views_and_byte_order_of_memory_make_no_difference() -> None:
    value = random_bits((6, 4), np.dtype("float32"))
    assert on_host(np.asfortranarray(value)) == on_host(value)
    assert on_host(np.repeat(value, 2, axis=0)[::2]) == on_host(value)
    assert on_host(value.tolist()) != on_host(value)  # Python numbers are float64


@pytest.mark.core
def test_the_digest_is_the_same_for_all_time() -> None:
    """Checkpoints on disk hold these numbers."""
    assert on_host(np.arange(12, dtype=np.float32).reshape(3, 4)) == [3267477163, 3771791462]
    assert on_host(np.arange(5, dtype=ml_dtypes.bfloat16)) == [400132911, 2852019652]
    assert on_host(np.float64(0.1)) == [3487243601, 57914524]
    tree = {"b": np.arange(3, dtype=np.int8), "a": {"c": np.True_}}
    words = [twin(x) for x in jax.tree.leaves(tree)]
    assert digest.state_digest(tree, words) == "bd91508afa5c87b5b34191b9bd0e6c7c"


def tree(**changes: Any) -> dict[str, Any]:
    return {"w": jnp.arange(6.0).reshape(2, 3), "n": jnp.int32(3), "k": jax.random.key(0)} | changes


def test_the_state_digest_covers_path_dtype_shape_and_bits() -> None:
    def whole(tree: Any) -> str:
        return digest.state_digest(tree, jax.jit(digest.tree_words)(tree))

    base = whole(tree())
    assert base == whole(dict(reversed(tree().items())))
    assert base == whole(jax.tree.map(lambda x: x, tree()))
    others = [
        tree(w=jnp.arange(6.0).reshape(3, 2)),
        tree(w=jnp.arange(6.0).reshape(2, 3).at[1, 1].set(4.5)),
        tree(n=jnp.uint32(3)),
        tree(k=jax.random.key(1)),
        tree(extra=jnp.zeros((0,))),
        {"v" if name == "w" else name: leaf for name, leaf in tree().items()},
    ]
    assert len({base, *map(whole, others)}) == len(others) + 1
    abstract = jax.eval_shape(lambda: tree())
    assert digest.state_digest(abstract, jax.jit(digest.tree_words)(tree())) == base


def test_leaf_paths_and_digests() -> None:
    nested = {"a": [jnp.zeros(2), {"b": jnp.ones(2)}], "c": (jnp.ones(()),)}
    assert digest.leaf_paths(nested) == ["a/0", "a/1/b", "c/0"]
    digests = digest.leaf_digests(nested, digest.tree_words(nested))
    assert list(digests) == digest.leaf_paths(nested)
    for path, leaf in zip(digests, jax.tree.leaves(nested), strict=True):
        first, second = on_host(np.asarray(leaf))
        assert digests[path] == f"{first:08x}{second:08x}"


def test_an_index_beyond_32_bits_still_counts() -> None:
    """Rows and columns are separate words: no two places of a large array share an index.

    Computed from the formula, on places alone: such an array does not fit this machine.
    """
    places = [(0, 0), (2**16, 0), (0, 2**16), (2**31, 5), (5, 2**31), (2**32 - 1, 2**32 - 1)]
    for c, r, _, _ in digest_host.LANES:
        mixed = {(column * c + row * r) % 2**32 for row, column in places}
        assert len(mixed) == len(places)


@pytest.mark.core
@pytest.mark.parametrize("spec", [(), ("a",), (None, "b"), (("b", "a"),), ("b", "a")])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.complex64])
def test_shards_add_up_to_the_whole_with_one_collective(spec: Any, dtype: Any) -> None:
    spec, mesh = (
        PartitionSpec(*spec),
        jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2),
    )
    x = np.random.default_rng(0).integers(-99, 99, (8, 8, 3)).astype(dtype)
    tree = {"x": jax.device_put(x, NamedSharding(mesh, spec)), "key": jax.random.key(1)}
    specs = {"x": spec, "key": PartitionSpec()}
    words = jax.jit(lambda t: digest.sharded_tree_words(t, specs, mesh))
    wanted = [twin(tree["key"]), twin(x)]
    np.testing.assert_array_equal(words(tree)[0], wanted)
    np.testing.assert_array_equal(words(tree)[1], [0, 0])
    text = words.lower(tree).compile().as_text() or ""
    assert sum(text.count(f" {c}(") for c in ("all-reduce", "all-gather", "all-to-all")) == 1


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64", "int32"])
@pytest.mark.parametrize("spec", [(), ("a",), (None, "b"), ("b", "a")])
def test_what_is_not_finite_is_counted_once_on_any_sharding(spec: Any, dtype: str) -> None:
    spec, mesh = (
        PartitionSpec(*spec),
        jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2),
    )
    x = jnp.ones((8, 8), dtype)
    if dtype != "int32":
        x = x.at[1, 2].set(jnp.nan).at[7, 7].set(-jnp.inf).at[0, 5].set(jnp.inf)
    words = jax.jit(lambda t: digest.sharded_tree_words(t, [spec], mesh))
    found, counts = words([jax.device_put(x, NamedSharding(mesh, spec))])
    np.testing.assert_array_equal(found, [twin(x)])
    assert counts.tolist() == [0 if dtype == "int32" else 3]
