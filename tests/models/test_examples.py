"""The examples are run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, devices: int) -> list[list[str]]:
    """The words of each line that an example prints: step N loss L digest D."""
    script = ROOT / "scripts/examples" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, script, "--cpu-devices", str(devices), "--steps", "21"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", ["train_functions", "train_nnx", "train_linen"])
def test_example_learns_the_same_on_any_devices(name: str) -> None:
    lines = run(name, devices=4)
    assert [words[1] for words in lines] == ["1", "11", "21"]
    assert float(lines[-1][3]) < 0.8 * float(lines[0][3])
    assert len(lines[-1][5]) == 32
    assert run(name, devices=1) == lines
