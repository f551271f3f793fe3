"""Degrees, and meshes of the eight simulated devices."""

import jax
import numpy as np
import pytest

from jaxrel.config import MeshConfig
from jaxrel.exit_codes import UsageError
from jaxrel.mesh.build import build_mesh, degrees, refit, resolve


def test_named_axes_come_after_the_three_in_order() -> None:
    config = MeshConfig(data=2, fsdp=-1, tensor=1, axes={"expert": 2, "context": 1})
    assert list(degrees(config).items()) == [
        ("data", 2), ("fsdp", -1), ("tensor", 1), ("expert", 2), ("context", 1),
    ]  # fmt: skip
    mesh = build_mesh(degrees(config))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 1, "expert": 2, "context": 1}


@pytest.mark.parametrize(
    ("wanted", "devices", "resolved"),
    [
        ({"data": -1, "fsdp": 1}, 8, (8, 1)),
        ({"data": 2, "fsdp": -1}, 8, (2, 4)),
        ({"data": -1, "fsdp": 8}, 8, (1, 8)),
        ({"data": 4, "fsdp": 2}, 8, (4, 2)),
        ({"data": -1, "fsdp": 1}, 1, (1, 1)),
        ({"data": -1, "fsdp": 2, "tensor": 3}, 12, (2, 2, 3)),
    ],
)
def test_one_degree_takes_what_is_left(
    wanted: dict[str, int], devices: int, resolved: tuple[int, ...]
) -> None:
    assert resolve(wanted, devices) == dict(zip(wanted, resolved, strict=True))


@pytest.mark.core
@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"data": 4, "fsdp": 1}, "mesh.data, mesh.fsdp: got data 4 x fsdp 1: the degrees must"
                                 " multiply to the 8 devices there are"),
        ({"data": 16, "fsdp": 1}, "got data 16 x fsdp 1"),
        ({"data": -1, "fsdp": 3}, "got data -1 x fsdp 3"),
        ({"data": -1, "fsdp": 16}, "got data -1 x fsdp 16"),
        ({"data": -1, "fsdp": -1}, "mesh.fsdp: got -1: only one degree may be -1, and data is"),
    ],
)  # fmt: skip
def test_degrees_that_do_not_fit_are_refused(wanted: dict[str, int], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build_mesh(wanted)


def test_neighbouring_devices_lie_on_the_innermost_axes() -> None:
    mesh = build_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    assert ids.tolist() == np.arange(8).reshape(2, 2, 2).tolist()


def test_a_mesh_of_some_of_the_devices() -> None:
    mesh = build_mesh({"data": -1, "fsdp": 2}, jax.devices()[:4])
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2}


@pytest.mark.core
@pytest.mark.parametrize(
    ("wanted", "devices", "fitted"),
    [
        ((8, 1, 1), 8, (8, 1, 1)),  # it fits: nothing changes
        ((8, 1, 1), 4, (4, 1, 1)),
        ((2, 4, 1), 4, (1, 4, 1)),  # fsdp keeps its degree as long as it can
        ((2, 4, 1), 2, (1, 2, 1)),
        ((2, 4, 1), 16, (4, 4, 1)),
        ((2, 2, 2), 4, (1, 2, 2)),  # tensor stays
        ((4, -1, 1), 2, (2, 1, 1)),
        ((-1, 4, 1), 2, (1, 2, 1)),
    ],
)
def test_batch_axes_are_refitted(
    wanted: tuple[int, ...], devices: int, fitted: tuple[int, ...]
) -> None:
    names = ("data", "fsdp", "tensor")
    found = refit(dict(zip(names, wanted, strict=True)), devices)
    assert tuple(found[name] for name in names) == fitted


def test_devices_that_the_tensor_axis_does_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="tensor 4: the degrees must multiply to the 2 devices"):
        refit({"data": 2, "fsdp": 1, "tensor": 4}, 2)
