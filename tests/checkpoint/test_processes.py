"""Real processes: out of space, interrupted, and two that save together."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrel.checkpoint import Checkpointer, host_random, listing
from jaxrel.exit_codes import ExitCode
from tests.checkpoint import states
from tests.checkpoint.worker import WIDTH

ROOT = Path(__file__).parents[2]


def start(mode: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.worker", mode, *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def finish(process: subprocess.Popen[str]) -> tuple[list[dict[str, Any]], str]:
    """What it said, and its standard error."""
    out, err = process.communicate(timeout=120)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], err


@pytest.mark.core
def test_a_full_disk_is_heard_at_the_next_check_and_at_the_end(tmp_path: Path) -> None:
    process = start("limited", tmp_path)
    (first, second), err = finish(process)
    assert first["check"].startswith("the save of step 2 failed: ")
    assert "File too large" in first["check"]
    assert (first["code"], first["latest"]) == (ExitCode.FAILED, 1)
    assert second["latest"] == 2
    assert process.returncode == 1
    assert "FailedError: the save of step 3 failed: " in err.strip().splitlines()[-1]
    assert listing.newest(tmp_path) == 2


def test_an_interrupt_joins_the_save_and_stays_the_reported_error(tmp_path: Path) -> None:
    process = start("interrupted", tmp_path)
    _, err = finish(process)
    assert err.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert process.returncode == -signal.SIGINT
    assert listing.newest(tmp_path) == 1


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Two processes of four devices save, and restore what one process of eight saved."""
    root = tmp_path_factory.mktemp("job")
    with Checkpointer(root / "theirs") as checkpointer:
        checkpointer.save(9, states.make(9, states.mesh(8, 1), WIDTH))
    port = free_port()
    processes = [start("rank", index, port, root) for index in range(2)]
    try:
        ended = [finish(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, ended, strict=True):
        assert process.returncode == 0, err
    return root, [said[0] for said, _ in ended]


def test_two_processes_save_and_restore_under_an_ambient_mesh(
    job: tuple[Path, list[dict[str, Any]]],
) -> None:
    root, reports = job
    for report in reports:
        assert (report["start"], report["latest"]) == (None, 3)
        assert report["equal"] and report["theirs_equal"]
        assert (report["random"], report["random_equal"]) == ("restored", True)
    assert sorted(p.name for p in (root / "ours").iterdir()) == ["2", "3"]


def test_what_two_processes_saved_is_restored_by_one(
    job: tuple[Path, list[dict[str, Any]]],
) -> None:
    for data, fsdp in ((8, 1), (1, 2)):
        mesh = states.mesh(data, fsdp)
        restored, manifest = Checkpointer(job[0] / "ours").restore(states.abstract(mesh, WIDTH))
        assert states.bits(restored) == states.bits(states.make(3, mesh, WIDTH))
    captured = manifest["extra"]["host_random"]
    assert len(set(captured)) == 2
    assert host_random.restore(captured, seed=0, step=3) == "derived"


def test_a_refusal_is_every_processs(job: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = job[1]
    assert first["backwards"].startswith("65 step 2 cannot be saved: ")
    assert second["backwards"].startswith("65 process 0 failed at this checkpoint")
    assert first["local"] == second["local"]
    assert first["local"][0].startswith("64 x: this array lives on one process")
    assert first["local"][1].startswith("64 x: with several processes, leaves must be jax.Arrays")
    assert first["one_fails"].startswith("65 process 1 failed at this checkpoint")
    assert "Input/output error" in second["one_fails"]


def test_processes_that_see_different_folders_are_named(
    job: tuple[Path, list[dict[str, Any]]],
) -> None:
    """After google/orbax 999: in seconds, and nothing is left behind."""
    for index, report in enumerate(job[1]):
        assert report["unshared"].startswith(
            f"64 checkpoint.dir: got '{job[0]}/own{index}': process"
        )
        assert "processes 1 do not see what process 0 wrote" in report["unshared"]
    assert list(job[0].rglob(".jaxrel-probe*")) == []


def test_each_process_writes_its_share(job: tuple[Path, list[dict[str, Any]]]) -> None:
    """Of replicated leaves too."""
    state = states.make(3, states.mesh(4, 2), WIDTH)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for step, size in ((job[0] / "ours" / "3", total), (job[0] / "replicated" / "1", 4 * 2**16)):
        for index in range(2):
            part = (step / "state" / f"ocdbt.process_{index}").rglob("*")
            written = sum(file.stat().st_size for file in part if file.is_file())
            assert 0.8 < written / (size / 2) < 1.2, (step, index)
