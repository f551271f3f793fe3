"""Every command in the README works as it is printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ELSEWHERE = (
    "./scripts/demo",  # tests/habits/test_demo.py runs what it runs
    "./scripts/test",  # this
    ". .venv/bin/activate",  # PATH, below
    "tensorboard ",  # a server; tests/report/test_tensorboard.py reads with its reader
)


def commands() -> list[str]:
    """The lines of the README's shell blocks, in order, without comments."""
    lines, kind = [], None
    for line in README.splitlines():
        if line.startswith("```"):
            kind = line if kind is None else None
        elif kind == "```":
            lines.append(line)
    starts = ("jaxrel ", "python ", "./", ". ", "tensorboard ")
    return [re.sub(r"\s+# .*", "", line) for line in lines if line.startswith(starts)]


def test_no_command_is_left_out() -> None:
    found = commands()
    assert len(found) >= 14, found
    assert all(any(line.startswith(x) for line in found) for x in ELSEWHERE)
    for path in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / path).exists(), path


@pytest.mark.slow
def test_every_command_works_as_printed(tmp_path: Path) -> None:
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    text = tmp_path / "path" / "to" / "text"
    text.mkdir(parents=True)
    for number in range(40):
        (text / f"{number}.txt").write_text(f"{number} is a number, and this is text.\n" * 400)
    clean = {name: x for name, x in os.environ.items() if not name.startswith("JAXREL_")}
    environment = clean | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
    }
    ran = 0
    for command in commands():
        if command.startswith(ELSEWHERE):
            continue
        done = subprocess.run(
            shlex.split(command),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, command
        ran += 1
    assert ran >= 10
    finished = [*tmp_path.glob("R*"), tmp_path / "run"]
    assert sorted(path.name for path in finished) == ["R", "R1", "R2", "R3", "run"]
    assert all(list((path / "ledger").glob("*-rank0-*.jsonl")) for path in finished)
