import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrel.cli import main
from jaxrel.events import Finished
from jaxrel.ledger import Ledger
from jaxrel.ledger.summary import report
from tests.ledger.records import FakeClock, write_segment

pytestmark = pytest.mark.core


@pytest.fixture
def run(tmp_path: Path) -> Path:
    clock = FakeClock()
    with Ledger(tmp_path, clock=clock, attempt=1) as ledger:
        ledger.resumed(0, devices=8)
        for number in (1, 2, 3):
            clock.sleep(1.0)
            ledger.step(number, loss=2.0)
        ledger.write(Finished(3, "cafe"))
    return tmp_path


def test_the_document_is_on_stdout_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == report(run)
    assert json.loads(out)["effective_s"] == 2.0


def test_a_person_sees_the_verdict_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "finished: step 3; effective training time 66.7% of 3.00 s"
    assert any(line.startswith("final state digest: cafe") for line in rest)


def test_without_jax_and_without_colour_in_a_pipe(run: Path) -> None:
    code = """
import sys
from jaxrel.cli import main
code = main(["report", sys.argv[1]])
heavy = {"jax", "flax", "grain", "orbax", "numpy"} & {*sys.modules}
print(code, sorted(heavy))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, run], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "jaxrel: RUN: got '{}': expected the directory of a run\n"),
        (".", "jaxrel: RUN: got '{}': it has no ledger: no run was recorded here\n"),
        ("empty", "jaxrel: RUN: got '{}': its ledger is empty: nothing was recorded yet\n"),
        ("x" * 300, "jaxrel: RUN: got '{}': expected the directory of a run\n"),
    ],
)
def test_what_is_no_run_is_one_line_and_64(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    path = tmp_path / name
    (tmp_path / "empty" / "ledger").mkdir(parents=True)
    write_segment(tmp_path / "empty", "a", [])
    for flags in ([], ["--json"]):
        assert main(["report", str(path), *flags]) == 64
        assert capsys.readouterr() == ("", message.format(path))


def test_a_ledger_of_a_later_version_is_65(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_segment(tmp_path, "a", ['{"v":9}\n'])
    assert main(["report", str(tmp_path)]) == 65
    assert "ledger/a.jsonl, line 1: got version 9" in capsys.readouterr().err


def test_wrong_words_are_64(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 64
    assert main(["report", "x", "--jsn"]) == 64
    assert "did you mean --json?" in capsys.readouterr().err
