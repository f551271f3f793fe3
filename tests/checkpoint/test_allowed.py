"""What a restore may change when it is told to, by path, and what it never changes."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrel.checkpoint import Checkpointer
from jaxrel.exit_codes import DataRefusedError
from tests.checkpoint import states


def state() -> dict[str, Any]:
    return {
        "params": {"w": jnp.linspace(0, 1, 24).reshape(4, 6), "b": jnp.ones(3)},
        "count": jnp.int32(16777217),
        "rng": jax.random.key(3),
    }


def abstract(value: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), value)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state())
    return tmp_path


@pytest.mark.core
def test_a_cast_is_refused_unless_its_path_is_named(saved: Path) -> None:
    """After asi 2714: an int32 counter must not come back as a float32 beside it."""
    wanted = abstract(state())
    wanted["params"]["w"] = jax.ShapeDtypeStruct((4, 6), jnp.bfloat16)
    wanted["count"] = jax.ShapeDtypeStruct((), jnp.float32)
    for cast, named in [((), "count: .*; params/w: "), (("params/*",), "state: count: saved as")]:
        with pytest.raises(DataRefusedError, match=named):
            Checkpointer(saved).restore(wanted, cast=cast)
    found, _ = Checkpointer(saved).restore(wanted, cast=("params/*", "count"))
    assert found["params"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["params"]["w"], state()["params"]["w"].astype(jnp.bfloat16))
    assert float(found["count"]) == 16777216.0  # asked for


def test_a_cast_keeps_the_sharding_that_was_asked_for(saved: Path) -> None:
    split = NamedSharding(states.mesh(4, 2), PartitionSpec("data", "fsdp"))
    wanted = abstract(state())
    wanted["params"]["w"] = jax.ShapeDtypeStruct((4, 6), jnp.float16, sharding=split)
    found, _ = Checkpointer(saved).restore(wanted, cast=["params/w"])
    assert found["params"]["w"].sharding.is_equivalent_to(split, 2)


@pytest.mark.core
def test_a_partial_load_needs_a_value_for_what_lacks(saved: Path) -> None:
    wanted = abstract(state())
    del wanted["params"]["b"]
    wanted["head"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    with pytest.raises(DataRefusedError, match="head: not in .*; params/b: only in"):
        Checkpointer(saved).restore(wanted)
    with pytest.raises(DataRefusedError, match="head: not in the checkpoint$"):
        Checkpointer(saved).restore(wanted, partial=("params/b", "head"))
    wanted["head"] = jnp.array([7.0, 8.0])
    found, _ = Checkpointer(saved).restore(wanted, partial=("params/b", "head"))
    assert found["head"].tolist() == [7.0, 8.0]
    assert set(found["params"]) == {"w"}
    np.testing.assert_array_equal(found["params"]["w"], state()["params"]["w"])


def test_shapes_and_keys_are_never_changed(saved: Path) -> None:
    for name, other in [("count", (2,)), ("rng", ())]:
        wanted = abstract(state()) | {name: jax.ShapeDtypeStruct(other, jnp.uint32)}
        with pytest.raises(DataRefusedError, match=f"state: {name}: saved as"):
            Checkpointer(saved).restore(wanted, cast=("*",), partial=("*",))


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.core
def test_another_type_of_node_is_refused_by_path(tmp_path: Path) -> None:
    x = jnp.ones(2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"opt": [x, (x, None)]})
    wanted = abstract({"opt": (x, Pair(x, None))})
    with pytest.raises(DataRefusedError, match="opt: saved as list, wanted tuple") as caught:
        Checkpointer(tmp_path).restore(wanted)
    assert "opt/1" in str(caught.value)
