"""20 steps are 10, SIGKILL and 10 more, bit for bit, for every kind of state."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint import exact

ROOT = Path(__file__).parent.parent.parent


def run(mode: str, directory: Path, code: int) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.checkpoint.exact", mode, str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.mark.core
def test_a_killed_run_ends_in_the_same_bits_for_every_kind_of_state(tmp_path: Path) -> None:
    """After maxtext 4343 (random state), optax's counters, averages, bf16 and integers."""
    straight = run("killed", tmp_path, -9)
    resumed = run("resumed", tmp_path, 0)
    assert set(straight) == set(exact.KINDS)
    assert resumed == straight
    assert len(set(straight.values())) == len(straight)  # each really is another state
