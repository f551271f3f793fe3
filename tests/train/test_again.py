"""Saves that fail for a reason that may pass."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from etils import epath

from jaxrel.checkpoint import Checkpointer
from jaxrel.checkpoint.errors import SaveFailedError
from jaxrel.checkpoint.listing import scan
from jaxrel.events import CheckpointFailed, CheckpointSaved
from jaxrel.exit_codes import ExitCode
from jaxrel.ledger.reader import read
from jaxrel.train.again import Again
from scripts.campaigns.workers import final_digest
from tests.train.test_run import Command, train  # noqa: F401  (a fixture)

PASSING = SaveFailedError(4, "failed: UNAVAILABLE", may_pass=True)
LASTING = SaveFailedError(4, "failed: No space left on device")


def test_each_try_is_later_than_the_one_before_and_they_end() -> None:
    now = [100.0]
    again = Again(clock=lambda: now[0])
    assert again.left_s is None
    pauses = []
    for _ in range(3):
        pauses.append(again.failed(PASSING))
        now[0] += 0.5
        assert again.left_s == pauses[-1] - 0.5
        now[0] += 60
        assert again.left_s == 0
        again.begun()
        assert again.left_s is None
    assert pauses == [1, 2, 4]
    assert again.failed(PASSING) is None


def test_a_complete_save_forgets_the_failures_before_it() -> None:
    again = Again(clock=lambda: 0.0)
    assert [again.failed(PASSING), again.failed(PASSING)] == [1, 2]
    again.landed()
    assert again.failed(PASSING) == 1


def test_what_will_not_pass_is_not_tried_again() -> None:
    assert Again().failed(LASTING) is None


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[str]]:
    """Storage whose next commits of a checkpoint fail; gives the paths of those that did."""

    def fails(times: int, number: int) -> list[str]:
        failed: list[str] = []
        rename = type(epath.Path("/")).rename

        def unreliable(self: Any, target: Any) -> Any:
            if "orbax-checkpoint-tmp" in self.name and len(failed) < times:
                failed.append(str(self))
                raise OSError(number, os.strerror(number))
            return rename(self, target)

        monkeypatch.setattr(type(epath.Path("/")), "rename", unreliable)
        return failed

    return fails


@pytest.mark.parametrize("times", [1, 3])
def test_a_commit_that_fails_is_told_and_made_again(
    tmp_path: Path,
    undisturbed: dict[str, Any],
    train: Command,  # noqa: F811
    storage: Callable[[int, int], list[str]],
    times: int,
) -> None:
    """Also the last one; the run ends in the bits of one that met no trouble."""
    failed = storage(times, errno.EIO)
    code, lines = train(**{"run.dir": tmp_path / "run", "checkpoint.interval": 100})
    assert code == 0, lines
    assert len(failed) == times and all("/checkpoints/16." in path for path in failed)
    told = [line for line in lines if "saving again in" in line]
    assert [line.split(" in ")[-1] for line in told] == ["1 s", "2 s", "4 s"][:times]
    assert "the save of step 16 failed: OSError: [Errno 5] Input/output error" in told[0]
    assert final_digest(lines) == undisturbed["final_digest"]
    assert [entry.step for entry in scan(tmp_path / "run" / "checkpoints")] == [16]
    events = [record.event for record in read(tmp_path / "run").records]
    assert [e.step for e in events if isinstance(e, CheckpointFailed)] == [16] * times
    assert [e.step for e in events if isinstance(e, CheckpointSaved)] == [16]


@pytest.mark.parametrize(("times", "number"), [(9, errno.EIO), (1, errno.ENOSPC)])
def test_it_gives_up_in_the_end_and_at_once_where_waiting_is_vain(
    tmp_path: Path,
    train: Command,  # noqa: F811
    storage: Callable[[int, int], list[str]],
    times: int,
    number: int,
) -> None:
    failed = storage(times, number)
    code, lines = train(**{"run.dir": tmp_path / "run", "checkpoint.interval": 100})
    assert code == ExitCode.FAILED
    assert len(failed) == (4 if number == errno.EIO else 1)
    assert "the save of step 16 failed" in lines[-1]


@pytest.mark.parametrize(("number", "passes"), [(errno.EIO, True), (errno.ENOSPC, False)])
def test_storage_that_fails_before_a_save_begins_is_trouble_of_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, passes: bool
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    checkpointer = Checkpointer(tmp_path / "checkpoints")
    monkeypatch.setattr(type(epath.Path("/")), "mkdir", fails)
    with pytest.raises(SaveFailedError, match="the save of step 3 cannot begin: ") as caught:
        checkpointer.save(3, {"x": jnp.ones(3)})
    assert (caught.value.step, caught.value.may_pass) == (3, passes)
