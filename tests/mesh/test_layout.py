"""Where parameters and groups lie."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrel.exit_codes import UsageError
from jaxrel.mesh.layout import Layout
from tests.train import toys

RULES = {"mlp": "tensor"}


@pytest.mark.core
def test_fsdp_is_the_bottom_of_the_tree_and_data_the_top() -> None:
    layout = Layout(toys.mesh(2, 2), 8, {})
    assert layout.group_ids()[:, :, 0].tolist() == [[0, 2], [4, 6]]
    assert layout.group_ids()[:, :, 1].tolist() == [[1, 3], [5, 7]]
    assert layout.process_groups() == list(range(8))


@pytest.mark.core
@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (8, 1), (1, 8), (2, 4), (4, 2)])
def test_every_group_lies_where_its_number_says(data: int, fsdp: int) -> None:
    layout = Layout(toys.mesh(data, fsdp), 8, {})
    rows = np.arange(16)[:, None] * np.ones(3, int)
    placed = layout.place(layout.split({"x": rows}))["x"]
    assert placed.shape == (data, 8 // (data * fsdp), fsdp, 2, 3)
    for shard in placed.addressable_shards:
        d, f = np.argwhere(layout.mesh.devices[:, :, 0] == shard.device)[0]
        groups = layout.group_ids()[d, :, f]
        found = np.asarray(shard.data)[0, :, 0, :, 0]
        assert found.tolist() == [[2 * g, 2 * g + 1] for g in groups]


def test_the_axis_of_a_parameter_does_not_follow_from_the_mesh() -> None:
    axes = set()
    for shape in [(1, 1), (2, 1), (1, 4), (4, 2)]:
        leaf = Layout(toys.mesh(*shape), 8, {}).leaf((3, 20, 48), np.float32, None, True)
        axes.add((leaf.block_axis, leaf.blocks))
        assert leaf.axis == -1
    assert axes == {(-1, 8)}


@pytest.mark.parametrize(
    ("shape", "axes", "stacked", "spec"),
    [
        ((64, 32), None, False, P(("fsdp", "data"), None)),
        ((32, 64), None, False, P(None, ("fsdp", "data"))),
        ((64, 64), ("embed", "mlp"), False, P(("fsdp", "data"), "tensor")),
        ((64, 64), ("mlp", "embed"), False, P("tensor", ("fsdp", "data"))),
        ((8, 64, 6), None, True, P(None, ("fsdp", "data"), None)),
        ((8, 6, 6), None, True, P(None, None, None)),
        ((5,), None, False, P(None)),
        ((), None, False, P()),
        ((64,), ("mlp",), False, P("tensor")),
    ],
)
def test_specs(shape: Any, axes: Any, stacked: bool, spec: P) -> None:
    layout = Layout(toys.mesh(2, 2, 2), 8, RULES)
    assert layout.leaf(shape, np.float32, axes, stacked).spec == spec


def test_a_tensor_degree_of_one_divides_nothing_but_keeps_its_axis_free() -> None:
    leaf = Layout(toys.mesh(2, 2), 8, RULES).leaf((64, 64), np.float32, ("mlp", None), False)
    assert leaf.spec == P(None, ("fsdp", "data"))


def test_rank_values() -> None:
    layout = Layout(toys.mesh(2, 1), 4, {})
    np.testing.assert_allclose(layout.rank_values([3.0, 4.0, 0.0, 0.0]), [[12.5**0.5], [0.0]])
    np.testing.assert_allclose(layout.rank_values([3.0, 4.0, 1.0, 2.0], rms=False), [[3.5], [1.5]])


def test_refusals() -> None:
    with pytest.raises(UsageError, match=r"batch.groups: got 6: mesh.data 4 x mesh.fsdp 1"):
        Layout(toys.mesh(4, 1), 6, {})
    with pytest.raises(UsageError, match="needs data and fsdp"):
        Layout(jax.make_mesh((2,), ("batch",)), 2, {})
    layout = Layout(toys.mesh(1, 2), 4, {})
    with pytest.raises(UsageError, match="got 6 rows: 4 groups"):
        layout.split({"x": np.zeros((6, 1))})
    with pytest.raises(UsageError, match="logical axes of a/b: got .*shape is"):
        layout.tree({"a": {"b": np.zeros((2, 2))}}, {"a": {"b": ("mlp",)}}, {})
