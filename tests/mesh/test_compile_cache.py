"""A restarted process compiles nothing, whichever rank it is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.campaigns.workers import ROOT, free_port


def job(directory: Path, processes: int, cache_dir: str | None = None) -> list[dict[str, Any]]:
    """What each process of a job says of the cache."""
    coordinator = f"127.0.0.1:{free_port()}"
    environment = {k: x for k, x in os.environ.items() if not k.startswith(("JAXREL_", "JAX_COMP"))}
    if cache_dir:
        environment["JAX_COMPILATION_CACHE_DIR"] = cache_dir
    started = []
    for rank in range(processes):
        settings = {"coordinator": coordinator, "process_id": rank, "num_processes": processes}
        command = [sys.executable, "-m", "tests.mesh.cached", json.dumps(settings), str(directory)]
        started.append(
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes
    return [
        json.loads(next(line for line in text.splitlines() if line.startswith("{")))
        for text in said
    ]


@pytest.mark.core
def test_every_rank_finds_its_programs_again(tmp_path: Path) -> None:
    first, again = job(tmp_path / "cache", 2), job(tmp_path / "cache", 2)
    for rank in (0, 1):
        assert first[rank]["cache_misses"] > 0
        assert again[rank]["cache_misses"] == 0
        assert again[rank]["cache_hits"] == again[rank]["compile_requests_use_cache"] > 0
    assert len({x["total"] for x in first + again}) == 1
    kinds = list((tmp_path / "cache").iterdir())
    assert len(kinds) == 1  # one kind of machine


def test_the_environment_wins(tmp_path: Path) -> None:
    job(tmp_path / "ours", 1, str(tmp_path / "theirs"))
    assert not (tmp_path / "ours").exists()
    assert any((tmp_path / "theirs").iterdir())
