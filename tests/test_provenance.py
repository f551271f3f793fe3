import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jaxrel
from jaxrel import provenance as module
from jaxrel.config import Config
from jaxrel.config_file import from_dict, load
from jaxrel.exit_codes import DataRefusedError, UsageError
from jaxrel.provenance import (
    changes,
    check_run,
    provenance,
    write_atomically,
    write_run_files,
)

pytestmark = pytest.mark.core
DEVICES = [SimpleNamespace(device_kind="cpu", process_index=i // 2) for i in range(4)]


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory under git, with one file, clean."""
    path = tmp_path / "repository"
    path.mkdir()
    monkeypatch.chdir(path)
    (path / "train.py").write_text("rate = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    return path


def test_what_a_start_is_made_of() -> None:
    config = from_dict({"mesh": {"fsdp": 2, "axes": {"expert": 3}}, "batch": {"global_size": 64}})
    record = provenance(config, ["jaxrel", "train", "a b.yaml"], DEVICES)
    assert record["command"] == "jaxrel train 'a b.yaml'"
    assert record["device_kinds"] == {"cpu": 4}
    assert record["processes"] == 2
    assert record["degrees"] == {"data": -1, "fsdp": 2, "tensor": 1, "expert": 3}
    assert record["global_batch"] == 64
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["time"])
    assert record["host"]
    assert set(record["packages"]) == {"python", "jaxrel", *module.PACKAGES}
    assert record["packages"]["jaxrel"] == jaxrel.__version__
    assert re.match(r"\d+\.", record["packages"]["jax"])
    assert from_dict(json.loads(json.dumps(record))["config"]) == config
    resolved = provenance(config, degrees={"data": 8, "fsdp": 1})
    assert resolved["degrees"] == {"data": 8, "fsdp": 1}


def test_the_code_is_named_and_what_was_changed_in_it(repository: Path) -> None:
    clean = provenance(Config())["code"]
    head = git("rev-parse", "HEAD")
    assert clean == {"revision": head, "dirty": False, "untracked": [], "patch": None}
    (repository / "train.py").write_text("rate = 2\n")
    (repository / "new.py").touch()
    dirty = provenance(Config())["code"]
    assert (dirty["revision"], dirty["dirty"], dirty["untracked"]) == (head, True, ["new.py"])
    assert "-rate = 1\n+rate = 2\n" in dirty["patch"]
    git("add", "train.py")  # staged is changed as well
    assert provenance(Config())["code"]["patch"] == dirty["patch"]
    git("checkout", "-q", "HEAD", "train.py")
    subprocess.run(["git", "apply"], input=dirty["patch"], text=True, check=True)
    assert (repository / "train.py").read_text() == "rate = 2\n"


def test_a_huge_patch_is_cut_and_says_so(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PATCH", 100)
    (repository / "train.py").write_text("x\n" * 1000)
    patch = provenance(Config())["code"]["patch"]
    assert len(patch) < 150
    assert re.search(r"\(cut: \d{4} characters in all\)\n$", patch)


def test_without_git_the_revision_is_unknown(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = {"revision": None, "dirty": None, "untracked": [], "patch": None}
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert provenance(Config())["code"] == unknown
    monkeypatch.chdir(repository)
    monkeypatch.setenv("PATH", "")
    assert provenance(Config())["code"] == unknown


def test_a_run_directory_says_what_it_is(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    config = from_dict(
        {
            "run": {"dir": str(run)},
            "data": {"skip": [3]},
            "job": {"coordinator": "h:1", "process_id": 0, "num_processes": 2},
        }
    )
    record = provenance(config, ["jaxrel"], DEVICES)
    write_run_files(run, config, record)
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "provenance.json"]
    written = load(run / "config.yaml")
    assert written.job == Config().job  # how processes met is the attempt's, not the run's
    assert (written.run, written.data) == (config.run, config.data)
    document = json.loads((run / "provenance.json").read_text())
    assert document == json.loads(json.dumps(record)) | {"attempts": []}
    assert document["config"]["job"]["coordinator"] == "h:1"


def test_earlier_starts_are_kept_newest_first(tmp_path: Path) -> None:
    def record(time: str, patch: str | None) -> dict[str, Any]:
        return {"time": time, "code": {"revision": "r", "patch": patch}}

    for time, patch in [("1", None), ("2", "p"), ("3", "p"), ("4", "q")]:
        write_run_files(tmp_path, Config(), record(time, patch))
    document = json.loads((tmp_path / "provenance.json").read_text())
    assert (document["time"], document["code"]["patch"]) == ("4", "q")
    assert document["attempts"] == [
        {"time": "3", "code": {"revision": "r", "patch": "p"}},
        {"time": "2", "code": {"revision": "r"}},  # the same patch as the one after it
        {"time": "1", "code": {"revision": "r", "patch": None}},
    ]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"run": {"seed": 1}}, "run.seed: got 1: this run was started with 0; keep that, or ch"),
        ({"batch": {"global_size": 64}}, "batch.global_size: got 64: this run was started with 32"),
        ({"batch": {"groups": 4}}, "batch.groups: got 4: this run was started with 8"),
        ({"batch": {"reduction": "invariant"}}, "batch.reduction: got 'invariant': this run was"),
        ({"batch": {"sequence": 1}}, "batch.sequence: got 1: this run was started with 128"),
        ({"model": {"hidden": 128}}, "model.hidden: got 128: this run was started with 64"),
        ({"model": {"dropout": 0}}, "model.dropout: got 0.0: this run was started with 0.1"),
    ],
)
def test_what_may_never_change_is_refused(
    values: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    write_run_files(tmp_path, Config(), provenance(Config()))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    changed = from_dict(values)
    for refuse in (
        lambda: check_run(tmp_path, changed),
        lambda: write_run_files(tmp_path, changed, provenance(changed)),
    ):
        with pytest.raises(DataRefusedError) as refusal:
            refuse()
        assert str(refusal.value).startswith(complaint)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_may_change_is_written(tmp_path: Path) -> None:
    write_run_files(tmp_path, Config(), provenance(Config()))
    longer = from_dict(
        {
            "run": {"steps": 90},
            "mesh": {"data": 2, "fsdp": 2},
            "checkpoint": {"interval": 5, "dir": "elsewhere"},
        }
    )
    write_run_files(tmp_path, longer, provenance(longer))
    assert load(tmp_path / "config.yaml") == longer
    assert json.loads((tmp_path / "provenance.json").read_text())["attempts"][0]["degrees"] == {
        "data": -1,
        "fsdp": 1,
        "tensor": 1,
    }


def test_what_changed_is_told(tmp_path: Path) -> None:
    config = Config()
    assert changes(tmp_path, config) == []
    write_run_files(tmp_path, config, provenance(config, ["jaxrel"], DEVICES))
    assert changes(tmp_path, config) == []
    other = replace(
        config,
        run=replace(config.run, steps=70, dir="elsewhere"),
        optimizer=replace(config.optimizer, learning_rate=1.0),
        data=replace(config.data, skip=(3,)),
        mesh=replace(config.mesh, data=4),
    )
    assert changes(tmp_path, other) == [
        "run.steps 60 -> 70",
        "optimizer.learning_rate 0.001 -> 1.0",
        "data.skip () -> (3,)",
    ]


def test_a_key_that_is_newer_than_the_run_is_no_change(tmp_path: Path) -> None:
    write_run_files(tmp_path, Config(), provenance(Config()))
    path = tmp_path / "config.yaml"
    path.write_text(path.read_text().replace("  rope_theta: 10000.0\n", ""))
    check_run(tmp_path, from_dict({"model": {"rope_theta": 5.0}}))


def test_what_no_run_wrote_is_left_alone(tmp_path: Path) -> None:
    check_run(tmp_path / "absent", Config())
    (tmp_path / "config.yaml").write_text("run: {steps: 3}\n")
    with pytest.raises(UsageError, match="it holds a config.yaml that no run wrote"):
        write_run_files(tmp_path, Config(), provenance(Config()))
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "run: {steps: 3}\n"


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"attempts": []}'])
def test_a_damaged_record_is_not_overwritten(tmp_path: Path, damage: str) -> None:
    write_run_files(tmp_path, Config(), provenance(Config()))
    path = tmp_path / "provenance.json"
    path.write_text(damage)
    with pytest.raises(DataRefusedError, match="provenance.json: is damaged: move it away"):
        write_run_files(tmp_path, Config(), provenance(Config()))
    assert path.read_text() == damage


def test_a_run_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in [
        (tmp_path / "file", "File exists"),
        (tmp_path / "file/run", "Not a directory"),
    ]:
        with pytest.raises(
            UsageError, match=f"^run.dir: got '{path}': cannot be written: {reason}"
        ):
            write_run_files(path, Config(), provenance(Config()))


def test_a_crash_while_writing_leaves_the_old_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    write_atomically(path, "old")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
