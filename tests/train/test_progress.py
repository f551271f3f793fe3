"""What is shown, where, and that nothing which happens to it stops a run."""

import errno
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxrel.checkpoint.listing import TMP_SUFFIX, newest
from jaxrel.train.progress import ProgressLine
from scripts.campaigns.workers import ROOT, Worker


class Clock:
    """A tenth of a second a step."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def text_of(progress: ProgressLine) -> str:
    file = progress.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def plain(every: int = 2) -> ProgressLine:
    console = Console(file=io.StringIO(), soft_wrap=True)
    return ProgressLine(5, 1024, every, console, Clock())


def test_plain_lines_at_the_first_step_every_few_and_the_last() -> None:
    with plain() as progress:
        for done in range(1, 6):
            progress.step(done, 5.0 - done, 0.5)
    lines = text_of(progress).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 1/5",
        "step 2/5",
        "step 4/5",
        "step 5/5",
    ]
    assert lines[0] == "step 1/5  loss 4.0000  grad norm 0.500"  # no rate from one step
    assert lines[1] == (
        "step 2/5  loss 3.0000  grad norm 0.500  10,240 tokens/s  100 ms/step  0:00 left"
    )


def test_a_resumed_run_shows_its_first_step_and_what_is_left() -> None:
    progress = ProgressLine(4000, 0, 1000, Console(file=io.StringIO(), soft_wrap=True), Clock())
    for done in range(1001, 2001):
        progress.step(done, 1.0, 1.0)
    first, last = text_of(progress).splitlines()
    assert first.startswith("step 1001/4000")
    assert last.endswith("  100 ms/step  3:20 left")  # no tokens: they are not known
    long = ProgressLine(72_001, 0, 1, Console(file=io.StringIO(), soft_wrap=True), Clock())
    for done in (1, 2):
        long.step(done, 1.0, 1.0)
    assert text_of(long).endswith("  2:00:00 left\n")


def test_a_note_is_printed_as_it_is() -> None:
    with plain() as progress:
        progress.note("resumed from step 3 [red]not markup[/red]")
    assert text_of(progress) == "resumed from step 3 [red]not markup[/red]\n"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EPIPE])
def test_a_console_that_fails_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, code: int, terminal: bool
) -> None:
    class Broken(io.StringIO):
        def write(self, s: str) -> int:
            raise OSError(code, os.strerror(code))

        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr(sys, "stderr", Broken())
    monkeypatch.setenv("TERM", "xterm")
    with ProgressLine(3, 1, 1) as progress:
        assert progress.console.is_terminal is terminal
        for done in range(1, 4):
            progress.step(done, 1.0, 1.0)
        progress.note("still here")


def start(run: Path, compiled: Path, stderr: Any, shell: str = "") -> subprocess.Popen[Any]:
    """The small run with its standard error going to `stderr`, or where the shell sends it."""
    return subprocess.Popen(
        ["sh", "-c", f'exec "$@" {shell}', "sh", *Worker.command(run, {"mesh.cpu_devices": 8})],
        cwd=ROOT,
        env=Worker.environment(compiled),
        stdin=subprocess.DEVNULL,
        stderr=stderr,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("undisturbed")  # compiles for the others
def test_a_terminal_gets_a_live_line(tmp_path: Path, compiled: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    process = start(tmp_path / "run", compiled, theirs)
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 65536):
            seen += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0
    shown = seen.decode()
    assert "\x1b[2K" in shown  # the line is drawn again in place
    words = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert re.search(r"step 0/16 ━+", words)
    assert re.search(r"step 16/16 ━+ loss \d", words)
    assert re.search(r"finished: step 16, state digest [0-9a-f]{32}", words)


@pytest.mark.slow
@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("how", ["full", "closed", "nobody reads"])
def test_training_goes_on_when_nothing_can_be_printed(
    tmp_path: Path, compiled: Path, how: str
) -> None:
    run = tmp_path / "run"
    if how == "full":
        with open("/dev/full", "w") as full:
            process = start(run, compiled, full)
    elif how == "closed":
        process = start(run, compiled, None, shell="2>&-")
    else:
        process = start(run, compiled, subprocess.PIPE)
        assert process.stderr is not None
        process.stderr.close()
    assert process.wait(120) == 0
    assert newest(run / "checkpoints") == 16


@pytest.mark.slow
@pytest.mark.usefixtures("undisturbed")
def test_an_interrupt_ends_at_once_and_joins_the_save_in_flight(
    tmp_path: Path, compiled: Path
) -> None:
    run = tmp_path / "run"
    worker = Worker(run, {"mesh.cpu_devices": 8}, cache=compiled)
    worker.wait_for("^step 9/")  # the save of step 8 is under way, or just done
    worker.process.send_signal(signal.SIGINT)
    assert worker.finish() == 130
    assert not [line for line in worker.lines if "Traceback" in line]
    saved = [path.name for path in (run / "checkpoints").iterdir()]
    assert "8" in saved
    assert not [name for name in saved if TMP_SUFFIX in name]
