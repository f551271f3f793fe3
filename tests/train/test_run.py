"""`jaxrel train` from the outside: again, longer, refused, damaged, diverged."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from jaxrel.checkpoint import Checkpointer, listing, manifest, marks
from jaxrel.cli import main
from jaxrel.config_file import load
from jaxrel.events import CheckpointRefused
from jaxrel.exit_codes import ExitCode
from jaxrel.ledger.reader import read
from jaxrel.mesh.build import build_mesh
from jaxrel.train.run import make_step
from jaxrel.train.task import reference_task
from scripts.campaigns.workers import ROOT, SMALL, Worker, final_digest

Command = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run(tmp_path: Path, undisturbed: dict[str, Any]) -> Path:
    """A finished run of one's own."""
    return shutil.copytree(undisturbed["run"], tmp_path / "run")


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str]) -> Command:
    """`jaxrel train` in this process, on its 8 devices: exit code and lines on stderr."""

    def command(**flags: Any) -> tuple[int, list[str]]:
        argv = ["train", str(ROOT / "scripts" / "configs" / "tiny.yaml")]
        for key, value in (SMALL | flags).items():
            argv += [f"--{key}", str(value)]
        capsys.readouterr()
        code = main(argv)
        return code, capsys.readouterr().err.splitlines()

    return command


def contents(folder: Path) -> dict[str, str]:
    """A hash of every file by path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# Again, and longer


@pytest.mark.core
def test_a_finished_run_says_so_and_changes_nothing(run: Path, train: Command) -> None:
    before = contents(run)
    code, lines = train(**{"run.dir": run})
    assert (code, lines) == (0, ["already complete: step 16 is saved, run.steps is 16"])
    assert contents(run) == before


@pytest.mark.slow
def test_more_steps_go_on_and_the_last_one_is_saved(run: Path, compiled: Path) -> None:
    worker = Worker(run, {"run.steps": 18, "mesh.cpu_devices": 8}, cache=compiled)
    assert worker.finish() == 0, worker.lines
    assert worker.lines[0] == "changed since the last start: run.steps 16 -> 18"
    assert worker.lines[1] == "resumed from step 16"
    steps = [line for line in worker.lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["17/18", "18/18"]
    last = listing.scan(run / "checkpoints")[-1]  # the interval does not divide 18
    assert (last.step, last.state_digest) == (18, final_digest(worker.lines))


@pytest.mark.core
@pytest.mark.slow
def test_a_finished_run_whose_last_checkpoint_is_damaged_is_finished_again(
    run: Path, undisturbed: dict[str, Any], compiled: Path
) -> None:
    """After marin 8760: the newest that is good is taken, and the rest trained once more."""
    largest = max((run / "checkpoints/16/state").rglob("d/*"), key=lambda f: f.stat().st_size)
    flip(largest)
    worker = Worker(run, {"mesh.cpu_devices": 8}, cache=compiled)
    assert worker.finish() == 0, worker.lines
    assert "resumed from step 12" in worker.lines
    assert final_digest(worker.lines) == undisturbed["final_digest"]
    refused = [r.event for r in read(run).records if isinstance(r.event, CheckpointRefused)]
    assert [(event.step, "16 is corrupt" in event.reason) for event in refused] == [(16, True)]
    entries = {e.step: e.status for e in listing.scan(run / "checkpoints") if e.complete}
    assert entries[16] == "verified"


# Refused


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("run.seed", 1, "run.seed: got 1: this run was started with 0"),
        ("batch.groups", 4, "batch.groups: got 4: this run was started with 8"),
        ("batch.reduction", "fast", "batch.reduction: got 'fast'"),
        ("data.corpus", "other", "the data is not what this run began with: content_hash was"),
    ],
)
def test_a_run_does_not_go_on_as_another(
    run: Path, tmp_path: Path, train: Command, key: str, value: Any, says: str
) -> None:
    if key == "data.corpus":
        value = corpus(tmp_path / "other", "another text. " * 200)
    before = contents(run)
    code, lines = train(**{"run.dir": run, "run.steps": 20, key: value})
    assert code == ExitCode.DATA_REFUSED
    assert len(lines) == 1
    assert lines[0].startswith("jaxrel: ") and says in lines[0]
    assert contents(run) == before


@pytest.mark.parametrize(
    ("key", "value"), [("run.seed", 1), ("batch.sequence", 16), ("batch.reduction", "fast")]
)
def test_checkpoints_do_not_go_on_in_another_run(
    run: Path, tmp_path: Path, train: Command, key: str, value: Any
) -> None:
    """The checkpoint says what it is of, whatever the run directory says."""
    new, before = tmp_path / "new", contents(run)
    flags = {"run.dir": new, "checkpoint.dir": run / "checkpoints", "run.steps": 20}
    code, lines = train(**{**flags, key: value})
    assert code == ExitCode.DATA_REFUSED
    assert len(lines) == 1
    assert f"{key.split('.')[1]}: got {value}: the checkpoint was made with" in lines[0]
    assert contents(run) == before
    assert not new.exists()


@pytest.mark.core
@pytest.mark.parametrize("name", ["position", "fingerprint", "host_random"])
def test_a_checkpoint_without_what_resumption_needs_is_refused(
    run: Path, train: Command, name: str
) -> None:
    path = run / "checkpoints" / "16" / manifest.ITEM / manifest.FILE
    content = json.loads(path.read_text())
    del content["checksum"], content["extra"][name]
    path.write_text(json.dumps(manifest.seal(content)))
    before = contents(run)
    code, lines = train(**{"run.dir": run, "run.steps": 20})
    assert code == ExitCode.DATA_REFUSED
    assert len(lines) == 1
    assert f"checkpoint of step 16: has no {name}" in lines[0]
    assert contents(run) == before


# Damaged: an exit code, and never a start from zero


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("item", [listing.STATE_ITEM, manifest.ITEM])
def test_when_all_checkpoints_are_damaged_nothing_is_trained(
    run: Path, train: Command, item: str, damage: Callable[[Path], None]
) -> None:
    for step in ("4", "8", "12", "16"):
        for file in (run / "checkpoints" / step / item).rglob("*"):
            if file.is_file():
                damage(file)
    before = {k: v for k, v in contents(run / "checkpoints").items() if marks.FILE not in k}
    code, lines = train(**{"run.dir": run, "run.steps": 20})
    assert code == ExitCode.DATA_REFUSED
    assert not [line for line in lines if line.startswith("step ")]
    assert "16" in lines[-1]
    after = contents(run / "checkpoints")
    assert {k: v for k, v in after.items() if marks.FILE not in k} == before


# Diverged


@pytest.mark.core
@pytest.mark.slow
def test_a_loss_that_is_not_finite_never_reaches_a_checkpoint(
    tmp_path: Path, compiled: Path
) -> None:
    run = tmp_path / "run"
    flags = {"optimizer.learning_rate": 1e30, "checkpoint.interval": 1, "mesh.cpu_devices": 8}
    worker = Worker(run, flags, cache=compiled)
    assert worker.finish() == ExitCode.DIVERGED
    newest = listing.newest(run / "checkpoints")
    assert newest
    assert worker.lines[-1].startswith(f"jaxrel: step {newest + 1}: loss ")
    assert worker.lines[-1].endswith("the update was kept out")

    config, mesh = load(run / "config.yaml"), build_mesh({"data": 8, "fsdp": 1, "tensor": 1})
    step = make_step(config, reference_task(config), mesh)
    state, _ = Checkpointer(run / "checkpoints").restore(step.abstract_state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.opt_state)))


# Configurations and data that cannot be used


def corpus(folder: Path, text: str) -> Path:
    """A corpus of two files of `text`."""
    source = folder.with_name(f"{folder.name}-text")
    source.mkdir()
    for name in "ab":
        (source / f"{name}.txt").write_text(f"{name} {text}")
    assert main(["data", "build", str(source), "--out", str(folder), "--held-out", "0"]) == 0
    return folder


def emptied(folder: Path) -> Path:
    corpus(folder, "text " * 500)
    for file in folder.rglob("*.array_record"):
        file.write_bytes(b"")
    return folder


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def binary(folder: Path) -> Path:
    made(folder).joinpath("tokens").write_bytes(bytes(range(256)) * 64)
    return folder


def a_file(folder: Path) -> Path:
    folder.write_text("no corpus")
    return folder


@pytest.mark.core
@pytest.mark.parametrize(
    ("flags", "data", "code", "says"),
    [
        ({}, lambda f: f, 65, "data"),  # missing
        ({}, made, 65, "data"),  # empty
        ({}, binary, 65, "data"),
        ({}, a_file, 65, "data"),
        ({}, emptied, 65, "data"),
        ({}, lambda f: corpus(f, "short"), 65, "fewer than batch.global_size 8"),
        (
            {"batch.sequence": 100_000},
            lambda f: corpus(f, "text " * 500),
            65,
            "0 windows of batch.sequence 100000 + 1",
        ),
        ({"batch.global_size": 12}, None, 64, "batch.global_size: got 12: expected a multiple"),
        ({"mesh.data": 4}, None, 64, "must multiply to the 8 devices there are"),
        ({"mesh.data": 16}, None, 64, "batch.groups: got 8: expected at least"),
        ({"mesh.data": 3}, None, 64, "mesh.data: got 3: expected a power of two"),
        ({"mesh.fsdp": 16}, None, 64, "mesh.fsdp"),
        ({"mesh.tensor": 3}, None, 64, "must divide model.heads"),
        ({"batch.groups": 3}, None, 64, "batch.groups: got 3: expected a power of two"),
        ({"model.vocabulary": 100}, None, 64, "model.vocabulary: got 100: the corpus has"),
        ({"data.pipeline": "nowhere:f"}, None, 64, "cannot import nowhere"),
        ({"checkpoint.dir": "/dev/null"}, None, 64, "is not a directory"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    train: Command,
    flags: dict[str, Any],
    data: Callable[[Path], Path] | None,
    code: int,
    says: str,
) -> None:
    if data:
        flags = {**flags, "data.corpus": data(tmp_path / "data")}
    before = contents(tmp_path)
    found, lines = train(**{"run.dir": tmp_path / "run", **flags})
    assert found == code, lines
    assert len(lines) == 1
    assert lines[0].startswith("jaxrel: ") and says in lines[0]
    assert contents(tmp_path) == before
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path: Path, train: Command) -> None:
    (tmp_path / "file").write_text("mine")
    code, lines = train(**{"run.dir": tmp_path / "file" / "run"})
    assert (code, len(lines)) == (ExitCode.USAGE, 1)
    assert "run.dir: got" in lines[0]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.core
def test_the_real_command_refuses_data_in_one_line(tmp_path: Path, compiled: Path) -> None:
    flags = {"data.corpus": tmp_path / "missing", "mesh.cpu_devices": 8}
    worker = Worker(tmp_path / "run", flags, cache=compiled)
    assert worker.finish() == ExitCode.DATA_REFUSED
    assert len(worker.lines) == 1 and str(tmp_path / "missing") in worker.lines[0]
    assert list(tmp_path.iterdir()) == []


def test_the_manifests_of_a_run_say_where_the_data_stands(undisturbed: dict[str, Any]) -> None:
    for step in (4, 8, 12, 16):
        found = manifest.read(epath.Path(undisturbed["run"] / "checkpoints" / str(step)))
        position = found["extra"]["position"]
        assert (found["step"], position["step"], position["position"]) == (step, step, step)
        assert sorted(position["groups"]) == [str(group) for group in range(8)]
