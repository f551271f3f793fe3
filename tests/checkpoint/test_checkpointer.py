"""Saving and restoring in one process."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrel.checkpoint import Checkpointer, listing
from jaxrel.digest import state_digest, tree_words
from jaxrel.exit_codes import DataRefusedError, FailedError, UsageError
from tests.checkpoint import states


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Lets a test put a function of its own in the way of every background write."""
    write = ocp.JsonCheckpointHandler._save_fn

    def hook(before: Callable[[], None]) -> None:
        async def slow(self: Any, *args: Any) -> None:
            await asyncio.to_thread(before)
            await write(self, *args)

        monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", slow)

    return hook


def raise_full() -> None:
    raise OSError(28, "No space left on device")


def save(directory: Path, *steps: int, keep: int = 9) -> Any:
    """Saves of a few steps of the small state; the last one."""
    state = None
    with Checkpointer(directory, keep=keep) as checkpointer:
        for step in steps:
            state = states.make(step, states.mesh(4, 2))
            checkpointer.save(step, state)
    return state


# What comes back


@pytest.mark.core
def test_every_kind_of_leaf_comes_back_with_its_bits_and_sharding(tmp_path: Path) -> None:
    mesh = states.mesh(4, 2)
    state = states.make(3, mesh)
    extra = {"position": 7, "nested": {"list": [1, 2.5, None, "x"]}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state, extra=extra)
        restored, manifest = checkpointer.restore(states.abstract(mesh))
    assert states.bits(restored) == states.bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert all(
        jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, state))
    )
    assert manifest["step"] == 3
    assert manifest["extra"] == extra
    assert manifest["state_digest"] == state_digest(state, jax.jit(tree_words)(state))
    assert manifest["leaves"]["keys"] == {
        "shape": [4],
        "dtype": "key<rbg>",
        "key_impl": "rbg",
        "digest": manifest["leaves"]["keys"]["digest"],
    }


@pytest.mark.core
def test_device_counts_and_axis_splits_change_at_every_restore(tmp_path: Path) -> None:
    state, digests = save(tmp_path, 1), []
    with Checkpointer(tmp_path, keep=9) as checkpointer:
        for step, (data, fsdp) in enumerate([(2, 2), (1, 2), (1, 1), (2, 4), (8, 1)], start=2):
            abstract = states.abstract(states.mesh(data, fsdp))
            restored, manifest = checkpointer.restore(abstract)
            assert states.bits(restored) == states.bits(state)
            assert [x.sharding for x in jax.tree.leaves(restored)] == [
                x.sharding for x in jax.tree.leaves(abstract)
            ]
            checkpointer.save(step, restored)
            digests.append(manifest["state_digest"])
    assert len(set(digests)) == 1


def test_an_older_step_can_be_asked_for(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    mesh = states.mesh(2, 2)
    restored, _ = Checkpointer(tmp_path).restore(states.abstract(mesh), 1)
    assert states.bits(restored) == states.bits(states.make(1, mesh))
    with pytest.raises(DataRefusedError, match=r"/3 is not a complete checkpoint"):
        Checkpointer(tmp_path).restore(states.abstract(mesh), 3)


def test_a_template_without_shardings_is_placed_on_the_mesh_of_the_rest(tmp_path: Path) -> None:
    state = save(tmp_path, 1)
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    restored, _ = Checkpointer(tmp_path).restore(bare)
    assert states.bits(restored) == states.bits(state)
    mesh = states.mesh(8, 1)
    restored, _ = Checkpointer(tmp_path).restore(bare | {"step": states.abstract(mesh)["step"]})
    assert restored["params"]["w"].sharding == NamedSharding(mesh, PartitionSpec())
    one = jax.ShapeDtypeStruct(
        (), jnp.int32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    with pytest.raises(UsageError, match="different sets of devices"):
        Checkpointer(tmp_path).restore(states.abstract(mesh) | {"step": one})


def test_numpy_leaves_and_python_numbers_are_copied(tmp_path: Path, storage: Callable) -> None:
    go = threading.Event()
    storage(go.wait)
    array = np.arange(1000, dtype=np.float32)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"array": array, "count": 5, "rate": 0.5, "on": True})
        array[:] = -1
        go.set()
        abstract = {
            "array": jax.ShapeDtypeStruct((1000,), jnp.float32),
            "count": jax.ShapeDtypeStruct((), jnp.int32),
            "rate": jax.ShapeDtypeStruct((), jnp.float32),
            "on": jax.ShapeDtypeStruct((), jnp.bool_),
        }
        restored, _ = checkpointer.restore(abstract)
    assert np.array_equal(restored["array"], np.arange(1000))
    assert (int(restored["count"]), float(restored["rate"]), bool(restored["on"])) == (5, 0.5, True)


def test_leaves_that_are_tied_to_no_device_go_with_the_rest(tmp_path: Path) -> None:
    """As a step counter beside sharded parameters."""
    split = NamedSharding(states.mesh(4, 2), PartitionSpec("data"))
    state = {"count": jnp.int32(3), "rng": jax.random.key(0), "w": jnp.ones(8, device=split)}
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in state.items()}
    abstract["w"] = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        restored, _ = checkpointer.restore(abstract)
    assert states.bits(restored) == states.bits(state)


def test_64_bit_leaves(tmp_path: Path) -> None:
    with jax.enable_x64(True), Checkpointer(tmp_path) as checkpointer:
        state = {"a": jnp.arange(5) * 2**40, "b": jnp.linspace(0, 1, 7), "c": jnp.complex128(1j)}
        checkpointer.save(1, state)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        restored, _ = checkpointer.restore(abstract)
        assert states.bits(restored) == states.bits(state)


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    """Saves at each of 20 steps whose state is given away at once; each one is what it was."""
    mesh = states.mesh(4, 2)
    state = states.make(0, mesh, width=128)

    def update(state: Any) -> Any:
        new = jax.tree.map(lambda x: x + jnp.ones_like(x), state["params"] | {"n": state["step"]})
        return state | {
            "step": new.pop("n"),
            "params": new,
            "opt_state": jax.tree.map(lambda x: x * 2, state["opt_state"]),
            "rng": jax.random.fold_in(state["rng"], 1),
            "bytes": state["bytes"] ^ jnp.uint8(85),
        }

    kept = jax.tree.map(lambda x: x.sharding, state)
    step_fn = jax.jit(update, donate_argnums=0, out_shardings=kept)
    recorded = {}
    with Checkpointer(tmp_path, keep=20) as checkpointer:
        for step in range(1, 21):
            checkpointer.save(step, state)
            recorded[step] = states.bits(state)
            state = step_fn(state)
            checkpointer.check()
        for step, expected in recorded.items():
            restored, _ = checkpointer.restore(states.abstract(mesh, width=128), step)
            assert states.bits(restored) == expected, step
    assert recorded[1] != recorded[2]


@pytest.mark.parametrize("ambient", [(4, 2), (2, 2)])
def test_an_ambient_mesh_changes_nothing(tmp_path: Path, ambient: tuple[int, int]) -> None:
    """Its own mesh or another one; also for a state on one device."""
    state = states.make(1, states.mesh(4, 2))
    one = {"x": jax.device_put(jnp.arange(3.0), jax.devices()[5]), "k": jax.random.key(1)}
    one["k"] = jax.device_put(one["k"], jax.devices()[5])
    with jax.set_mesh(states.mesh(*ambient)):
        for name, value in (("mesh", state), ("one", one)):
            abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), value
            )
            with Checkpointer(tmp_path / name) as checkpointer:
                checkpointer.save(1, value)
                restored, _ = checkpointer.restore(abstract)
            assert states.bits(restored) == states.bits(value)


# What is refused before a byte is read or written


def _template(change: str) -> tuple[Any, str]:
    mesh = states.mesh(4, 2)
    abstract = states.abstract(mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    if change == "shape":
        abstract["params"]["bias"] = struct((8,), jnp.float32)
        return abstract, r"params/bias: saved as float32 \[7\], wanted float32 \[8\]"
    if change == "dtype":
        abstract["step"] = struct((), jnp.float32)
        return abstract, r"step: saved as int32 \[\], wanted float32 \[\]"
    if change == "missing":
        del abstract["params"]["bias"]
        return abstract, "params/bias: only in the checkpoint"
    if change == "extra":
        abstract["params"]["new"] = struct((2,), jnp.float32)
        return abstract, "params/new: not in the checkpoint"
    abstract["rng"] = struct((), jax.random.key(0, impl="rbg").dtype)
    return abstract, r"rng: saved as key<fry> \[\], wanted key<rbg> \[\]"


@pytest.mark.core
@pytest.mark.parametrize("change", ["shape", "dtype", "missing", "extra", "key"])
def test_a_template_that_differs_is_refused_by_path(tmp_path: Path, change: str) -> None:
    save(tmp_path, 1)
    abstract, message = _template(change)
    with pytest.raises(DataRefusedError, match=message) as caught:
        Checkpointer(tmp_path).restore(abstract)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(": saved as") <= 1  # the equal leaves are not listed


def test_many_differences_are_counted(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": jnp.ones(2)})
        abstract = {f"y{i}": jax.ShapeDtypeStruct((2,), jnp.float32) for i in range(20)}
        with pytest.raises(DataRefusedError, match="and 13 more"):
            checkpointer.restore(abstract)


@pytest.mark.core
@pytest.mark.parametrize("step", [2, 3])
def test_a_step_that_is_not_newer_is_refused(tmp_path: Path, step: int) -> None:
    save(tmp_path, 3)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(DataRefusedError, match=f"step {step} cannot be saved.*holds step 3"):
            checkpointer.save(step, {"x": jnp.ones(2)})
        checkpointer.save(4, {"x": jnp.ones(2)})
        checkpointer.wait()
        assert checkpointer.latest() == 4


def test_bad_arguments(tmp_path: Path) -> None:
    x = jnp.ones(2)
    checkpointer = Checkpointer(tmp_path / "new")
    for state, message in [
        ({}, "no leaves"),
        ({"x": jnp.zeros((0, 2))}, "nothing to save"),
        ({"x": "text"}, "x: str of dtype"),
        ({"x": x, "deep": [object()]}, "deep/0: object of dtype"),
        ({"x": np.arange(3, dtype=np.int64)}, "x: ndarray of dtype int64"),
        ({"a": {"b": x}, "a/b": x}, "two leaves with the path 'a/b'"),
    ]:
        with pytest.raises(UsageError, match=message):
            checkpointer.save(1, state)
    for extra in ({"x": np.ones(2)}, {"x": float("nan")}):
        with pytest.raises(UsageError, match="extra of step 1 is not JSON"):
            checkpointer.save(1, {"x": x}, extra=extra)
    with pytest.raises(UsageError, match="step -1"):
        checkpointer.save(-1, {"x": x})
    with pytest.raises(UsageError, match="keep: got 1: expected at least 2, so that there is an"):
        Checkpointer(tmp_path, keep=1)
    with pytest.raises(UsageError, match="keep_every: got -1"):
        Checkpointer(tmp_path, keep_every=-1)
    with pytest.raises(UsageError, match="deadline 0"):
        Checkpointer(tmp_path, deadline_s=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is not a directory"):
        Checkpointer(tmp_path / "file")
    assert listing.scan(tmp_path / "new") == []


def test_without_a_checkpoint_there_is_nothing_to_restore(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "none")
    assert checkpointer.latest() is None
    with pytest.raises(DataRefusedError, match="no complete checkpoint in .*/none"):
        checkpointer.restore({"x": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert not (tmp_path / "none").exists()


# What else lies in the directory


@pytest.mark.core
def test_leftovers_and_foreign_entries_are_not_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 3)
    theirs = [tmp_path / "7", tmp_path / "8" / "model", tmp_path / "notes.orbax-checkpoint-tmp"]
    for folder in theirs:
        folder.mkdir(parents=True)
    (tmp_path / "9").write_text("a file")
    (tmp_path / "4.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (tmp_path / "5.orbax-checkpoint-tmp-0").mkdir()
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest() == 3
    assert (tmp_path / "4.orbax-checkpoint-tmp").exists()  # a reader takes nothing away
    state = {"x": jnp.ones(2)}
    with checkpointer:
        for taken in (7, 8, 9):
            with pytest.raises(DataRefusedError, match=f"/{taken} is in its place"):
                checkpointer.save(taken, state)
        checkpointer.save(4, state)
    assert checkpointer.latest() == 4
    assert not list(tmp_path.glob("[0-9]*.orbax-checkpoint-tmp*"))
    assert all(folder.exists() for folder in theirs)
    assert (tmp_path / "9").read_text() == "a file"


def test_a_checkpoint_of_another_program_is_left_alone(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(
            50,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave({"x": jnp.ones(2)}),
                manifest=ocp.args.JsonSave({"some": "thing"}),
            ),
        )
    save(tmp_path, 1, 2, 3, keep=2)
    assert Checkpointer(tmp_path).latest() == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3", "50"]


def test_the_newest_are_kept_and_the_old_go_only_after_the_commit(
    tmp_path: Path, storage: Callable
) -> None:
    save(tmp_path, 1, 2, keep=2)
    go = threading.Event()
    storage(go.wait)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(3, states.make(3, states.mesh(4, 2)))
        assert listing.newest(tmp_path) == 2
        assert {e.step for e in listing.scan(tmp_path) if e.good} == {1, 2}
        go.set()
        checkpointer.wait()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


def test_a_deletion_that_fails_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind: Any = type(listing.epath.Path("/"))
    rename = kind.rename

    def refuse(self: Any, *target: Any) -> Any:
        if target and "-old" not in str(target[0]):
            return rename(self, *target)  # the commit of a save
        raise PermissionError(13, "Permission denied")

    for method, complaint in (("rename", "old checkpoints .* stay"), ("rmtree", "not be deleted")):
        directory = tmp_path / method
        save(directory, 1, 2)
        with monkeypatch.context() as patch:
            patch.setattr(kind, method, refuse)
            save(directory, 3, keep=2)
        assert Checkpointer(directory).latest() == 3
        assert re.search(complaint, caplog.text)
        assert len(list(directory.iterdir())) == 3


# How a save ends


def test_a_failed_background_save_is_heard_once_with_its_step(
    tmp_path: Path, storage: Callable[[Callable[[], None]], None]
) -> None:
    """And tried again: what the failed ones left behind, writers too, is not in the way."""
    save(tmp_path, 4)
    mesh = states.mesh(4, 2)
    failures, temporary = iter([raise_full] * 3), set()

    def write() -> None:
        temporary.update(tmp_path.glob("*tmp*"))
        next(failures, lambda: None)()

    storage(write)
    with Checkpointer(tmp_path) as checkpointer:
        for trial in range(3):
            checkpointer.save(5, states.make(trial, mesh))
            with pytest.raises(FailedError, match="the save of step 5 failed.*No space left"):
                while True:
                    checkpointer.check()
                    time.sleep(0.001)
            checkpointer.check()
            assert checkpointer.latest() == 4
        checkpointer.save(5, states.make(5, mesh))
        restored, _ = checkpointer.restore(states.abstract(mesh), 5)
        assert states.bits(restored) == states.bits(states.make(5, mesh))
        checkpointer.save(6, states.make(6, mesh))
    assert [e.step for e in listing.scan(tmp_path) if e.good] == [4, 5, 6]
    assert len(temporary) == 5  # none wrote where another had


@pytest.mark.parametrize("call", ["save", "latest", "restore", "wait", "close"])
def test_every_method_tells_of_a_failed_save(tmp_path: Path, storage: Callable, call: str) -> None:
    state = {"x": jnp.ones(2)}
    checkpointer = Checkpointer(tmp_path)
    storage(raise_full)
    checkpointer.save(1, state)
    assert checkpointer._flight is not None
    checkpointer._flight.thread.join()
    arguments = {"save": (2, state), "restore": ({"x": jax.ShapeDtypeStruct((2,), jnp.float32)},)}
    with pytest.raises(FailedError, match="the save of step 1 failed"):
        getattr(checkpointer, call)(*arguments.get(call, ()))


@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_the_save_in_flight_is_joined_on_every_way_out(
    tmp_path: Path, storage: Callable, ending: type[BaseException] | None
) -> None:
    storage(lambda: threading.Event().wait(0.3))

    def run() -> None:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, {"x": jnp.ones(2)})
            assert listing.newest(tmp_path) is None
            if ending is not None:
                raise ending("the original")

    if ending is None:
        run()
    else:
        with pytest.raises(ending, match="the original"):
            run()
    assert listing.newest(tmp_path) == 1


def test_the_error_of_the_run_stays_the_reported_one(tmp_path: Path, storage: Callable) -> None:
    storage(raise_full)
    with pytest.raises(ValueError, match="the original") as caught, Checkpointer(tmp_path) as c:
        c.save(1, {"x": jnp.ones(2)})
        raise ValueError("the original")
    assert "the save of step 1 failed" in caught.value.__notes__[0]
    with pytest.raises(FailedError, match="the save of step 1 failed"), Checkpointer(tmp_path) as c:
        c.save(1, {"x": jnp.ones(2)})


def test_an_overdue_save_is_named(tmp_path: Path, storage: Callable) -> None:
    go = threading.Event()
    storage(go.wait)
    checkpointer = Checkpointer(tmp_path, deadline_s=60)
    checkpointer.save(1, {"x": jnp.ones(2)})
    checkpointer.check()
    with pytest.raises(FailedError, match="the save of step 1 is not finished after 0.0 s"):
        checkpointer.wait(0.01)
    checkpointer.deadline_s = 0.001  # as if that time had passed
    for method in (checkpointer.check, checkpointer.wait, checkpointer.latest):
        with pytest.raises(FailedError, match="the save of step 1 is not finished"):
            method()
    go.set()
    checkpointer.wait(60)
    assert checkpointer.latest() == 1


# The manifest and the bytes


def test_a_damaged_manifest_is_refused_and_not_taken_for_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    file = tmp_path / "1" / "manifest" / "metadata"
    sound = json.loads(file.read_text())
    abstract = states.abstract(states.mesh(4, 2))
    for damaged in [
        json.dumps(sound | {"extra": {"position": 1}}),
        json.dumps(sound | {"step": 2}),
        json.dumps({k: v for k, v in sound.items() if k != "checksum"}),
        json.dumps(sound)[:-10],
        "",
    ]:
        file.write_text(damaged)
        _refuses_to_start(tmp_path, abstract, "step 1: .*its manifest is damaged")
    file.unlink()
    _refuses_to_start(tmp_path, abstract, "step 1: its manifest is gone")
    file.write_text(json.dumps(sound))
    (tmp_path / "1").rename(tmp_path / "2")
    _refuses_to_start(tmp_path, abstract, "step 2: .*its manifest is that of step 1")


def _refuses_to_start(directory: Path, abstract: Any, why: str) -> None:
    message = rf"none of the checkpoints in {directory} is good \({why}"
    for ask in (lambda c: c.latest(), lambda c: c.restore(abstract)):
        with pytest.raises(DataRefusedError, match=message):
            ask(Checkpointer(directory))


def test_replicated_leaves_are_written_once(tmp_path: Path) -> None:
    state = states.make(1, states.mesh(4, 2), width=512)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    written = listing.list_checkpoints(tmp_path)["checkpoints"][0]["bytes"]
    share = sum(x.nbytes for x in jax.tree.leaves(state))
    assert 0.9 < written / share < 1.2
