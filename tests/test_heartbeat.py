"""The last word of a process is readable while it lives and after it died."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrel import heartbeat
from jaxrel.heartbeat import Beat, Heartbeat

WRITER = """
import sys
from jaxrel.heartbeat import Heartbeat
beat = Heartbeat(sys.argv[1])
n = 0
while True:
    n += 1
    beat.beat("step" if n % 2 else "wait", n, n + 7)
    if n == 1000:
        print("going", flush=True)
"""


@pytest.mark.core
def test_no_torn_reading_of_a_busy_writer_and_its_last_word_after_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    heartbeat.create(path)
    assert heartbeat.read(path) == Beat()
    assert path.stat().st_mode & 0o777 == 0o600
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    with writer, contextlib.ExitStack() as always:
        always.callback(writer.kill)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "going\n"
        whole, last = 0, 0
        for _ in range(20_000):
            if (found := heartbeat.read(path)) is None:
                continue  # in the middle of a write
            whole += 1
            assert found.dispatched == found.completed + 7
            assert found.phase == ("step" if found.completed % 2 else "wait")
            assert found.completed >= last
            last = found.completed
        assert whole > 1000
    found = heartbeat.read(path)
    assert found is None or found.completed >= last


def test_an_error_is_cut_to_one_line_of_what_fits(tmp_path: Path) -> None:
    path = tmp_path / "beat"
    heartbeat.create(path)
    beat = Heartbeat(path)
    beat.can_dump()
    beat.failed(ValueError("two\nlines " + "é" * 5000))
    found = heartbeat.read(path)
    assert found
    assert found.dumps
    assert found.phase == "failed"
    assert found.error.startswith("ValueError: two lines éé")
    assert len(found.error.encode()) <= 1024 + 2
    beat.failed(KeyError("x"))
    found = heartbeat.read(path)
    assert found
    assert found.error == "KeyError: 'x'"


def test_without_an_agent_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(heartbeat.ENVIRONMENT, raising=False)
    Heartbeat.from_environment().beat("step", 1, 2)
    assert heartbeat.read(tmp_path / "none") is None
    (tmp_path / "short").write_bytes(b"x")
    assert heartbeat.read(tmp_path / "short") is None
