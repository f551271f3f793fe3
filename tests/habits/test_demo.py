"""The demo refuses what is not its own, shows the loop close, and does not take its word for it."""

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxrel.cli import main
from jaxrel.habits.demo import demo, verdict
from jaxrel.ledger.reader import read
from jaxrel.ledger.summary import summarize


def test_a_folder_that_holds_something_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    assert main(["demo", "--dir", str(tmp_path)]) == 64
    message = f"jaxrel: --dir: got '{tmp_path}': expected a new or empty folder\n"
    assert capsys.readouterr().err == message
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """The folder of a demo, what it printed, and its exit code."""
    folder, out = tmp_path_factory.mktemp("demo"), StringIO()
    code = demo(str(folder), Console(file=out, width=100))
    return folder, out.getvalue(), code


@pytest.mark.slow
def test_the_loop_closes(runs: tuple[Path, str, int]) -> None:
    folder, printed, code = runs
    assert code == 0, printed
    assert printed.count("\nyes ") == 5
    assert "found by the leader: killed by SIGKILL" in printed
    assert "found by the leader: stopped by a signal" in printed
    alone, run = (summarize(read(folder / name)).document for name in ("undisturbed", "run"))
    assert alone["final_state_digest"] == run["final_state_digest"]
    assert str(run["final_state_digest"]) in printed
    assert [(f["kind"], f["rank"]) for f in run["failures"][:2]] == [("signal", 1), ("stopped", 0)]
    assert [a["devices"] for a in run["attempts"]] == [8, 8, 8, 4, 8]
    parts = sum(round(s * 1e6) for s in run["badput_s"].values())
    assert parts + round(run["effective_s"] * 1e6) == round(run["wall_s"] * 1e6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "field", "value"),
    [
        ("Finished", "state_digest", "00" * 16),
        ("StepCompleted", "loss", 1.5),
        ("Evaluated", "loss", 1.5),
        ("FailureDetected", "rank", 7),
        ("Resumed", "devices", 2),
    ],
)
def test_one_difference_is_enough_to_fail(
    runs: tuple[Path, str, int], tmp_path: Path, event: str, field: str, value: Any
) -> None:
    shutil.copytree(runs[0] / "undisturbed" / "ledger", tmp_path / "undisturbed" / "ledger")
    shutil.copytree(runs[0] / "run" / "ledger", tmp_path / "run" / "ledger")
    changed = 0
    for segment in sorted((tmp_path / "run" / "ledger").iterdir(), reverse=True):
        lines = [json.loads(line) for line in segment.read_text().splitlines()]
        for line in lines:
            counts = line["by"] in ("rank0", "leader") and line.get("kind") != "preempted"
            if line["event"] == event and counts and not changed:
                line[field], changed = value, 1
        segment.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert changed
    alone, run = (summarize(read(tmp_path / name)) for name in ("undisturbed", "run"))
    out = StringIO()
    code = verdict(alone, run, read(tmp_path / "run"), tmp_path, Console(file=out, width=100))
    assert code == 1
    assert "NO " in out.getvalue()
