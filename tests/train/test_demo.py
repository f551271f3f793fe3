"""`scripts/demo`: what it refuses, and what it takes for proof."""

import subprocess
import sys
from pathlib import Path

from scripts import demo
from scripts.campaigns.workers import ROOT


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.demo", "--dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 64
    assert done.stderr == f"demo: --dir: got {tmp_path}: expected a new or empty folder\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_attempt_is_what_its_output_tells() -> None:
    attempt = demo.Attempt()
    assert attempt.read("resumed from step 20; host random states derived") is None
    assert attempt.read("step 21/60  loss 2.7  grad norm 0.5  9 tokens/s  1 ms/step") == 21
    assert attempt.read("finished: step 60, state digest 0a1b") is None
    assert (attempt.resumed_from, attempt.digest) == (20, "0a1b")
    assert attempt.losses == {21: "loss 2.7  grad norm 0.5"}
