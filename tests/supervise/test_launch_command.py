"""What `jaxrel launch` refuses before anything starts, and where it takes its run directory."""

from pathlib import Path

import pytest

from jaxrel.cli import main
from jaxrel.supervise import launch as module
from jaxrel.supervise.launch import Launch


@pytest.mark.core
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--dir R --", "CMD: got nothing: expected a command after --"),
        ("--dir R", "CMD: got nothing: expected a command after --"),
        ("--dir R -- no-such-command 1", "CMD: got 'no-such-command': there is no such command"),
        ("-- sleep 1", "--dir: got nothing: expected the run directory; CMD has no --run.dir"),
        ("--hosts 0 --dir R -- sleep 1", "--hosts: got 0: expected at least 1"),
        (
            "--hosts 100000 --dir R -- sleep 1",
            "--hosts: got 100000: expected at most 512 processes",
        ),
        ("--dir= -- sleep 1", "--dir: got '': expected the run's directory"),
        (f"--dir {'x' * 300} -- sleep 1", "cannot be written: File name too long"),
        ("--hosts two --dir R -- sleep 1", "hosts: got 'two': expected a number"),
        ("--processes-per-host 0 --dir R -- sleep 1", "--processes-per-host: got 0: expected at"),
        ("--cpu-devices 0 --dir R -- sleep 1", "--cpu-devices: got 0: expected at least 1"),
        ("--max-restarts -1 --dir R -- sleep 1", "--max-restarts: got -1: expected at least 0"),
        ("--max-no-progress 0 --dir R -- sleep 1", "--max-no-progress: got 0: expected at least"),
        ("--hang-floor 0 --dir R -- sleep 1", "--hang-floor: got 0.0: expected seconds above 0"),
        ("--hang-floor nan --dir R -- sleep 1", "hang_floor: got 'nan': expected a number"),
        ("--grace -1 --dir R -- sleep 1", "--grace: got -1.0: expected seconds from 0"),
        ("--spares -1 --dir R -- sleep 1", "--spares: got -1: expected at least 0"),
        ("--hosts 2 --min-hosts 3 --dir R -- sleep 1", "--min-hosts: got 3: expected from 1 to"),
        ("--shrink-after -1 --dir R -- sleep 1", "--shrink-after: got -1.0: expected seconds"),
        ("--grow-after -1 --dir R -- sleep 1", "--grow-after: got -1.0: expected seconds from"),
        ("--drain-after 0 --dir R -- sleep 1", "--drain-after: got 0: expected at least 1"),
        ("--host-return -1 --dir R -- sleep 1", "--host-return: got -1.0: expected seconds"),
        ("--backend slurm --dir R -- sleep 1", "--backend: got slurm: expected local"),
        ("--restarts 3 --dir R -- sleep 1", "--restarts: got '3': unknown flag; did you mean"),
        ("--dir R sleep 1", "one argument too many"),
        ("-- jaxrel train none.yaml", "none.yaml: no such file"),
    ],
)
def test_refused_in_one_line(
    argv: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.shutil, "which", lambda name: None if "no-such" in name else name)
    assert main(["launch", *argv.split()]) == 64
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "run_dir"),
    [
        (["--dir", "R", "--", "sleep", "--run.dir", "S"], "R"),
        (["--", "sleep", "--run.dir", "S"], "S"),
        (["--", "sleep", "--run.dir=S S", "1"], "S S"),
        (["--", "sleep", "--run.dir", "S", "--run.dir=T"], "T"),
        (["--", "sleep", "train", "c.yaml", "--run.steps", "3"], "from the file"),
        (["--", "sleep", "train", "c.yaml", "--run.dir", "S"], "S"),
    ],
)
def test_where_the_run_is(
    argv: list[str], run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Launch] = []
    monkeypatch.setattr(module, "launch", lambda asked: launched.append(asked) or 7)
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("run: {dir: from the file}\n")
    assert main(["launch", "--hosts", "3", *argv]) == 7
    (asked,) = launched
    assert asked.run_dir == run_dir
    assert asked.command == tuple(argv[argv.index("--") + 1 :])
    assert (asked.hosts, asked.processes_per_host, asked.hang_floor) == (3, 1, 60.0)


def test_a_file_that_is_not_executable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script := tmp_path / "f.sh").write_text("true")
    assert main(["launch", "--dir", str(tmp_path / "R"), "--", str(script)]) == 64
    assert f"CMD: got '{script}': it is not executable" in capsys.readouterr().err


def test_a_number_in_words_and_a_command_with_two_dashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[Launch] = []
    monkeypatch.setattr(module, "launch", lambda asked: launched.append(asked) or 0)
    assert main(["launch", "--dir", "R", "--", "env", "--", "sleep"]) == 0
    assert launched[0].command == ("env", "--", "sleep")
