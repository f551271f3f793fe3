"""A damaged checkpoint is passed over for the next older good one, and told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrel.checkpoint import Checkpointer, listing
from jaxrel.checkpoint.errors import DamagedError
from jaxrel.exit_codes import DataRefusedError, FailedError
from tests.checkpoint import states

# Orbax leaves coroutines behind when a read fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

WIDTH = 64  # the parts of `w` are too large to stand inside Orbax's own index


def save(directory: Path, *steps: int, **options: Any) -> None:
    with Checkpointer(directory, keep=9, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, states.make(step, states.mesh(4, 2), WIDTH))
            checkpointer.wait()


def damage(directory: Path, step: int) -> None:
    """One bit of the values of the largest leaf."""
    file = max((directory / str(step) / "state").rglob("d/*"), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def statuses(directory: Path) -> dict[int, str]:
    return {entry.step: entry.status for entry in listing.scan(directory)}


ABSTRACT = states.abstract(states.mesh(2, 2), WIDTH)


def expected(step: int) -> Any:
    return states.bits(states.make(step, states.mesh(2, 2), WIDTH))


@pytest.mark.core
def test_the_next_older_good_one_is_taken_and_the_bad_one_marked(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, verify_mb_s=0)
    damage(tmp_path, 3)
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest() == 3  # nobody knows yet
    state, manifest = checkpointer.restore(ABSTRACT)
    assert manifest["step"] == 2
    assert states.bits(state) == expected(2)
    ((step, why),) = checkpointer.refused()
    assert step == 3 and "digests differ in" in why
    assert checkpointer.refused() == []
    assert statuses(tmp_path) == {1: "committed", 2: "committed", 3: "corrupt"}
    document = listing.list_checkpoints(tmp_path)
    assert document["latest_restorable"] == Checkpointer(tmp_path).latest() == 2
    with pytest.raises(DamagedError, match="/3 is corrupt: digests differ"):  # by its name
        Checkpointer(tmp_path).restore(ABSTRACT, 3)


def test_when_none_is_good_the_run_refuses_to_start_and_says_why(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, verify_mb_s=0)
    damage(tmp_path, 1)
    shutil.rmtree(tmp_path / "2" / "state" / "ocdbt.process_0")
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(DataRefusedError, match=r"none of .* good \(step 2: .*; step 1: .*\)"):
        checkpointer.restore(ABSTRACT)
    assert [step for step, _ in checkpointer.refused()] == [2, 1]
    with pytest.raises(DataRefusedError, match="none of the checkpoints"):
        Checkpointer(tmp_path).latest()
    assert statuses(tmp_path) == {1: "corrupt", 2: "corrupt"}


def test_a_template_that_does_not_fit_is_no_damage(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    with pytest.raises(DataRefusedError, match="/2 does not fit this state"):
        Checkpointer(tmp_path).restore({"x": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert set(statuses(tmp_path).values()) == {"verified"}


def failing(checkpointer: Checkpointer, error: Callable[[], Exception], times: int) -> list[int]:
    """Let the first `times` reads of arrays fail; returns a list that counts all reads."""
    read, calls = checkpointer._arrays.restore, []

    def restore(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) <= times:
            raise error()
        return read(*args, **kwargs)

    checkpointer._arrays.restore = restore  # type: ignore[method-assign]
    return calls


def eio() -> Exception:
    return OSError(5, "Input/output error")


def test_trouble_that_passes_is_waited_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After tensorstore 210: two reads fail, then the run continues."""
    save(tmp_path, 1)
    checkpointer = Checkpointer(tmp_path)
    calls = failing(checkpointer, eio, 2)
    state, _ = checkpointer.restore(ABSTRACT)
    assert states.bits(state) == expected(1)
    assert len(calls) == 3 and caplog.text.count("Input/output error; again in") == 2


def test_a_part_that_stays_unreadable_is_passed_over_but_not_called_corrupt(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1, 2, verify_mb_s=0)
    checkpointer = Checkpointer(tmp_path)
    failing(checkpointer, eio, 4)
    state, manifest = checkpointer.restore(ABSTRACT)
    assert manifest["step"] == 1 and states.bits(state) == expected(1)
    assert [step for step, _ in checkpointer.refused()] == [2]
    assert statuses(tmp_path) == {1: "committed", 2: "committed"}


def test_a_permission_that_lacks_fails_at_once(tmp_path: Path) -> None:
    """After tensorstore 210: nothing is wrong with the checkpoint, and going back loses work."""
    save(tmp_path, 1, 2)
    checkpointer = Checkpointer(tmp_path)
    calls = failing(checkpointer, lambda: PermissionError(13, "Permission denied"), 9)
    with pytest.raises(FailedError, match="/2 cannot be read: .*Permission denied"):
        checkpointer.restore(ABSTRACT)
    assert len(calls) == 1


@pytest.mark.core
def test_a_new_timeline_never_meets_the_old_one(tmp_path: Path) -> None:
    """After maxtext 5260: after going back, saves at and below the old steps happen."""
    save(tmp_path, 5, 10, 15)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.restore(ABSTRACT, 5)
        for step in (7, 10):
            checkpointer.save(step, states.make(100 + step, states.mesh(2, 2), WIDTH))
            checkpointer.wait()
            assert checkpointer.latest() == step
        state, _ = checkpointer.restore(ABSTRACT)
        assert states.bits(state) == expected(110)
        aside = [p.name for p in tmp_path.iterdir() if listing.ASIDE_SUFFIX in p.name]
        assert sorted(name.split(".")[0] for name in aside) == ["10", "15"]
        with pytest.raises(DataRefusedError, match="already holds step 10"):
            checkpointer.save(10, state)
        checkpointer.save(15, states.make(115, states.mesh(2, 2)))
    left = [(e.step, e.status) for e in listing.scan(tmp_path)]
    assert left == [(10, "verified"), (15, "verified"), (15, "aside")]  # the aside 10 went
    assert [r["step"] for r in listing.list_checkpoints(tmp_path)["checkpoints"]] == [10, 15]


def test_a_corrupt_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, verify_mb_s=0)
    damage(tmp_path, 2)
    with Checkpointer(tmp_path) as checkpointer:
        state, _ = checkpointer.restore(ABSTRACT)
        checkpointer.save(2, state)
    assert Checkpointer(tmp_path).latest() == 2


def test_a_mark_is_of_one_state_and_a_damaged_mark_says_nothing(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    with Checkpointer(tmp_path / "b", verify_mb_s=0) as checkpointer:
        checkpointer.save(1, states.make(9, states.mesh(4, 2)))
    assert statuses(tmp_path / "a") == {1: "verified"}
    mark = tmp_path / "a" / "1" / "jaxrel-marks.json"
    shutil.copy(mark, tmp_path / "b" / "1")
    assert statuses(tmp_path / "b") == {1: "committed"}
    mark.write_text(mark.read_text().replace("false", "true"))
    assert statuses(tmp_path / "a") == {1: "committed"}
    for text in ("[]", "{", '{"checksum": 1}', "\0"):
        mark.write_text(text)
        assert statuses(tmp_path / "a") == {1: "committed"}


@pytest.mark.core
def test_committed_verified_trusted(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=9, trust_after=10) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, states.make(step, states.mesh(4, 2)))
            checkpointer.wait()
            checkpointer.settle()
            checkpointer.healthy(step + 5)
        assert checkpointer.latest_trusted() == 10
        checkpointer.save(40, states.make(40, states.mesh(4, 2)))
        assert checkpointer.latest_trusted() == 20  # told when a later one lands
        assert checkpointer.latest_trusted(before=20) == 10
        assert checkpointer.latest_trusted(before=10) is None
    rows = listing.list_checkpoints(tmp_path)["checkpoints"]
    assert [row["trusted"] for row in rows] == [True, True, False, False]
    assert {row["status"] for row in rows} == {"verified"}


def test_what_is_read_back_and_differs_is_told(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, verify_mb_s=1e-9)  # waits after the first piece
    checkpointer.save(1, states.make(1, states.mesh(4, 2)))
    checkpointer.wait()
    damage(tmp_path, 1)
    with pytest.raises(FailedError, match="/1 is corrupt: read back.*; start again"):
        checkpointer.close()
    assert [step for step, _ in checkpointer.refused()] == [1]
    assert statuses(tmp_path) == {1: "corrupt"}


def test_a_mark_is_not_taken_for_a_manifest(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    shutil.copy(tmp_path / "2" / "jaxrel-marks.json", tmp_path / "2" / "manifest" / "metadata")
    assert statuses(tmp_path) == {1: "verified", 2: "corrupt"}


def test_another_files_content_in_the_manifest_never_means_that_nothing_is_there(
    tmp_path: Path,
) -> None:
    save(tmp_path, 2)
    shutil.copy(tmp_path / "2" / "_CHECKPOINT_METADATA", tmp_path / "2" / "manifest" / "metadata")
    message = r"none of .* is good \(step 2: its manifest is not jaxrel's\)"
    for ask in (lambda c: c.latest(), lambda c: c.restore(ABSTRACT)):
        with pytest.raises(DataRefusedError, match=message):
            ask(Checkpointer(tmp_path))


def test_the_manifest_tells_versions_mesh_and_types(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, states.make(1, states.mesh(4, 2)), metric=2.5)
    found = json.loads((tmp_path / "1" / "manifest" / "metadata").read_text())
    assert found["mesh"] == {"data": 4, "fsdp": 2}
    assert (found["processes"], found["metric"]) == (1, 2.5)
    assert found["versions"]["jax"] == jax.__version__
    assert found["nodes"][""] == "dict"
    assert found["nodes"]["opt_state/0"] == "ScaleByAdamState"
    assert found["nodes"]["opt_state/1"] == "EmptyState"
