"""Checkpoints in an object store: what holds of files holds there, without a rename."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from etils import epath

from jaxrel.checkpoint import Checkpointer, listing, object_store
from jaxrel.checkpoint.readback import bad_leaves
from jaxrel.checkpoint.verify import verify
from jaxrel.exit_codes import DataRefusedError, FailedError, UsageError
from tests.checkpoint import states
from tests.checkpoint.store import WIDTH, Server, digest
from tests.checkpoint.test_processes import free_port

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ROOT = Path(__file__).parents[2]
MESH = (4, 2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("s3"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.stop()


@pytest.fixture(params=["s3", "files"])
def directory(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> str:
    """An empty place: the same tests hold in both."""
    if request.param == "files":
        return str(tmp_path / "checkpoints")
    return f"s3://bucket/{secrets.token_hex(4)}/checkpoints"


@pytest.fixture
def s3(server: Server) -> str:
    return f"s3://bucket/{secrets.token_hex(4)}/checkpoints"


def make(step: int) -> Any:
    return states.make(step, states.mesh(*MESH), WIDTH)


def save(directory: str, *steps: int, **options: Any) -> None:
    with Checkpointer(directory, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, make(step))


def start(mode: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.store", mode, *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def found(directory: str) -> list[tuple[int, str]]:
    return [(entry.step, entry.status) for entry in listing.scan(directory)]


def restored(directory: str, step: int | None = None) -> tuple[int, Any]:
    with Checkpointer(directory) as checkpointer:
        state, manifest = checkpointer.restore(states.abstract(states.mesh(2, 4), WIDTH), step)
    return manifest["step"], states.bits(state)


@pytest.mark.slow
def test_the_same_bits_come_back_here_and_in_another_process(directory: str) -> None:
    save(directory, 1, 2)
    assert found(directory) == [(1, "verified"), (2, "verified")]
    bits = states.bits(make(2))
    assert restored(directory) == (2, bits)
    assert said(start("reader", directory)) == {"step": 2, "bits": digest(bits)}
    assert verify(directory)["ok"]
    listed = listing.list_checkpoints(directory)
    assert listed["latest_restorable"] == 2
    assert all(row["bytes"] > 100_000 for row in listed["checkpoints"])


def test_retention_leaves_nothing_of_what_goes(directory: str) -> None:
    save(directory, 1, 2, 3, 4, keep=2)
    assert [step for step, _ in found(directory)] == [3, 4]
    if object_store.remote(directory):
        names = object_store.objects(epath.Path(directory))
        assert {name.partition(".save-")[0] for name in names} == {"3", "4"}


@pytest.mark.parametrize(
    "at",
    [
        "_CHECKPOINT_METADATA",
        "manifest/metadata",
        "state/_METADATA",
        "state/commit_success.txt",
        "-2/commit_success.txt",
    ],
)
def test_a_killed_save_is_not_complete_and_the_step_is_saved_again(s3: str, at: str) -> None:
    process = start("killed", s3, at)
    _, err = process.communicate(timeout=120)
    assert process.returncode == -9, err[-3000:]
    complete = [(step, status) for step, status in found(s3) if status != "incomplete"]
    assert [step for step, _ in complete] == [1]
    assert restored(s3) == (1, states.bits(make(1)))
    save(s3, 2)
    assert found(s3) == [(1, "verified"), (2, "verified")]
    assert restored(s3) == (2, states.bits(make(2)))
    names = {name.partition("/")[0] for name in object_store.objects(epath.Path(s3))}
    assert len(names) == 2  # what the dead save left is gone


def test_a_damaged_object_is_refused_and_the_older_checkpoint_is_taken(s3: str) -> None:
    save(s3, 1, 2, verify_mb_s=0)
    entry = listing.scan(s3)[-1]
    sizes = object_store.objects(entry.path)
    values = [name for name in sizes if "/d/" in name]
    largest = entry.path / max(values, key=sizes.__getitem__)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(bytes(content))
    assert restored(s3) == (1, states.bits(make(1)))
    assert found(s3) == [(1, "committed"), (2, "corrupt")]
    with pytest.raises(DataRefusedError, match="corrupt|cannot be read"):
        restored(s3, 2)


def test_a_copy_on_disk_can_be_restored(s3: str, tmp_path: Path) -> None:
    save(s3, 1, 2)
    for name in object_store.objects(epath.Path(s3)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((epath.Path(s3) / name).read_bytes())
    assert restored(str(tmp_path)) == (2, states.bits(make(2)))


def test_a_lost_object_is_damage(s3: str) -> None:
    save(s3, 1, 2, verify_mb_s=0)
    entry = listing.scan(s3)[-1]
    (entry.path / "state" / "manifest.ocdbt").unlink()
    assert restored(s3) == (1, states.bits(make(1)))
    rows = verify(s3)["checkpoints"]
    assert [row["ok"] for row in rows] == [True, False]


def test_steps_of_a_left_timeline_are_set_aside_and_saved_anew(directory: str) -> None:
    save(directory, 1, 2, 3)
    with Checkpointer(directory) as checkpointer:
        checkpointer.restore(states.abstract(states.mesh(*MESH), WIDTH), 1)
        checkpointer.save(2, make(12))
        checkpointer.settle()
        assert checkpointer.latest() == 2
    assert sorted(found(directory)) == [
        (1, "verified"),
        (2, "aside"),
        (2, "verified"),
        (3, "aside"),
    ]
    assert restored(directory) == (2, states.bits(make(12)))
    save(directory, 3, 4, 5, keep=2)
    assert [step for step, _ in found(directory)] == [4, 5]


def test_another_process_s_saves_are_seen_at_once(s3: str) -> None:
    with Checkpointer(s3) as checkpointer:
        assert checkpointer.latest() is None
        process = start("writer", s3)
        assert process.stdin is not None and process.stdout is not None
        for step in (1, 2):
            process.stdin.write(f"{step}\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline()) == {"saved": step}
            assert checkpointer.latest() == step
    process.communicate(timeout=60)


@pytest.mark.slow
def test_two_processes_save_and_restore_together(s3: str) -> None:
    port = free_port()
    processes = [start("rank", index, port, s3) for index in range(2)]
    assert [said(process) for process in processes] == [{"step": 3, "equal": True}] * 2
    assert restored(s3) == (3, states.bits(make(3)))
    assert [step for step, _ in found(s3)] == [2, 3]


@pytest.mark.slow
def test_a_lost_server_fails_the_save_by_the_deadline_and_is_used_again(
    server: Server, s3: str
) -> None:
    checkpointer = Checkpointer(s3, deadline_s=20.0, verify_mb_s=0)
    checkpointer.save(1, make(1))
    checkpointer.wait()
    server.stop()
    try:
        began = time.monotonic()
        with pytest.raises(FailedError, match="step 2"):
            checkpointer.save(2, make(2))
            checkpointer.wait()
        assert time.monotonic() - began < 60
    finally:
        server.start()
    checkpointer.save(2, make(2))
    checkpointer.wait()
    assert found(s3) == [(1, "committed"), (2, "committed")]
    assert restored(s3) == (2, states.bits(make(2)))
    assert verify(s3)["ok"]
    checkpointer.close()


def test_arrays_that_cannot_be_reached_are_not_taken_for_damaged(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(s3, 1, verify_mb_s=0)
    (entry,) = listing.scan(s3)
    with monkeypatch.context() as patch:  # the server is lost after the manifest was read
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        patch.setitem(object_store._RETRIES, "max_retries", 1)
        with pytest.raises(OSError, match="ABORTED"):
            bad_leaves(entry.path)
        with pytest.raises(DataRefusedError, match="cannot be read"):
            restored(s3)
    assert found(s3) == [(1, "committed")]
    assert restored(s3) == (1, states.bits(make(1)))


@pytest.mark.slow
def test_a_server_lost_in_the_middle_of_a_save_fails_that_save_alone(
    server: Server, s3: str
) -> None:
    state = make(1) | {"large": jax.numpy.ones((8, 1 << 20))}  # on its way for longer than a kill
    checkpointer = Checkpointer(s3, deadline_s=60.0, verify_mb_s=0)
    checkpointer.save(1, state)
    checkpointer.wait()
    checkpointer.save(2, state)
    server.stop()
    with pytest.raises(FailedError, match="the save of step 2 failed: .*Could not connect"):
        checkpointer.wait()
    server.start()
    assert checkpointer.latest() == 1
    checkpointer.save(3, state)
    checkpointer.wait()
    assert found(s3) == [(1, "committed"), (3, "committed")]
    checkpointer.close()


def test_what_is_no_place_for_checkpoints_is_refused() -> None:
    for name in ("gs://bucket/x", "s3://", "s3:///"):
        with pytest.raises(UsageError, match="expected a path, or s3://bucket/prefix"):
            Checkpointer(name)
