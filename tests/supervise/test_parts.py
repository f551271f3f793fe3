"""The small parts: messages, console, ports, and the proof of death."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxrel.heartbeat import Beat
from jaxrel.ledger.reader import read
from jaxrel.supervise import exchange as x
from jaxrel.supervise import proc
from jaxrel.supervise.console import Console
from jaxrel.supervise.leader import Job, Leader
from jaxrel.supervise.messages import Hello, ProtocolError, Spawn, decode, encode
from jaxrel.supervise.narrator import Narrator
from jaxrel.supervise.policy import Policy
from jaxrel.supervise.ports import fresh_ports
from jaxrel.supervise.provisional import Provisional
from jaxrel.supervise.verdict import Budget


@pytest.mark.core
def test_the_supervisor_needs_no_jax() -> None:
    code = (
        "import sys, jaxrel.supervise.launch, jaxrel.supervise.agent;"
        "print([m for m in ('jax', 'jaxlib', 'numpy', 'flax', 'orbax') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (out.stdout, out.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    "message",
    [
        Hello("host0", "secret"),
        Spawn(2, [0, 1], 4, "127.0.0.1:20000", "/run", ["a b", "ü", "$(x)"], 4),
        x.Progress(1, 0, Beat("failed", 3, 4, 5, True, "KeyError: 'x'\n"), 0.25),
        x.Dump(1, (0, 1)),
        x.Gone(1, "host0"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_arrive_as_they_were(message: Any) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    arrived = decode(line)
    if isinstance(message, x.Dump):
        assert arrived == x.Dump(1, [0, 1])  # type: ignore[arg-type]
    else:
        assert arrived == message


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\xff\xfe", b"[]", b"null", b"7", b"{}", b'{"is": "Hello"}', b'{"is": "Beat"}',
        b'{"is": "Hello", "host": 7, "token": "x"}', b'{"is": "Gone", "attempt": "1", "host": "h"}',
        b'{"is": "Progress", "attempt": 1, "rank": 0, "beat": 3, "at": 0}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(line)


def test_a_token_is_known_or_not() -> None:
    assert Hello("h", "secret").knows("secret")
    assert not Hello("h", "secrets").knows("secret")
    assert not Hello("h", "").knows("secret")
    assert not Hello("h", "ü").knows("secret")


def test_a_console_never_waits_and_says_what_it_left_out() -> None:
    reading, writing = os.pipe()
    console = Console(writing)
    started = time.monotonic()
    for number in range(60_000):
        console.say(f"line {number} {'x' * 40}")
    assert time.monotonic() - started < 20.0  # blocked, it would stay here for ever
    assert os.get_blocking(writing)  # others who use this pipe wait as before
    arrived = bytearray()

    def read() -> None:
        while part := os.read(reading, 1 << 16):
            arrived.extend(part)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    console.close()
    os.close(writing)
    reader.join(20.0)
    os.close(reading)
    assert b"lines were left out" in arrived
    assert b"line 0 " in arrived
    assert arrived.endswith(b"line 59999 " + b"x" * 40 + b"\n")


def test_a_console_survives_its_reader_and_shows_no_control_characters() -> None:
    reading, writing = os.pipe()
    console = Console(writing)
    console.say("a\x1b[2Jb\nc")
    assert os.read(reading, 100) == b"a?[2Jb?c\n"
    os.close(reading)
    console.say("nobody is there")
    console.close()
    os.close(writing)


def test_a_console_does_not_wait_for_a_terminal_that_is_halted() -> None:
    code = (
        "import os, pty; from jaxrel.supervise.console import Console;"
        "console = Console(pty.openpty()[1]);"
        "[console.say('x' * 100) for _ in range(2000)]; console.close(); print('through')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert out.stdout == "through\n", out.stderr


def test_ports_are_free_fresh_and_below_those_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    lent = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first = fresh_ports()()
    assert 20_000 <= first < lent
    with socket.create_server(("127.0.0.1", 0)) as taken:
        drawn = iter([taken.getsockname()[1], first, first, first + 1, first + 2])
        monkeypatch.setattr("random.randrange", lambda low, high: next(drawn))
        pick = fresh_ports()
        assert pick() == first
        assert pick() in (first + 1, first + 2)


class OnlyAStranger:
    """Hosts of which none comes; in its place somebody without the token."""

    def start(self, leader: str, token: str, gone: Callable[[str], None]) -> None:
        assert len(token) == 32
        self.answer = asyncio.create_task(self.knock(leader))

    async def knock(self, leader: str) -> bytes:
        host, _, port = leader.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(encode(Hello("host0", "guessed")))
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), 5.0)
        return b""

    def kill(self, host: str) -> None:
        raise AssertionError(host)

    async def stop(self) -> None:
        self.said = await self.answer


def test_who_has_no_token_is_no_host(tmp_path: Path) -> None:
    hosts = OnlyAStranger()
    with contextlib.closing(Provisional(tmp_path, 1, 1)) as ledger:
        leader = Leader(
            Job(("sleep", "1"), tmp_path),
            Policy(("host0",), host_s=1.0),
            Budget(),
            hosts=hosts,
            ledger=ledger,
            pick_port=fresh_ports(),
            narrator=Narrator(Console(os.open(os.devnull, os.O_WRONLY)), tmp_path),
        )
        assert asyncio.run(asyncio.wait_for(leader.run(), 20.0)) == 70
    assert hosts.said == b""
    assert "no agent on host0 within 1 s" in read(tmp_path).records[-1].event.reason  # type: ignore[union-attr]


def test_members_are_found_by_session_and_by_environment(tmp_path: Path) -> None:
    token = f"TOKEN={tmp_path}"
    environment = os.environ | {"TOKEN": str(tmp_path)}
    sleeper = ["sleep", "60"]
    mine = subprocess.Popen(sleeper, start_new_session=True)
    other = subprocess.Popen(sleeper, start_new_session=True, env=environment)
    stranger = subprocess.Popen(sleeper, start_new_session=True)
    try:
        ends = time.monotonic() + 10
        while proc.members({mine.pid}, [token]) != sorted([mine.pid, other.pid]):
            assert time.monotonic() < ends
        assert proc.members(set(), [token, "TOKEN=else"]) == []
        assert proc.members(set(), []) == []
        os.kill(mine.pid, signal.SIGSTOP)
        proc.kill([mine.pid, other.pid])
        while proc.members({mine.pid}, [token]):  # zombies do not count
            assert time.monotonic() < ends
        assert stranger.poll() is None
        text = proc.describe(stranger.pid)
        assert "State: S (sleeping)" in text
        assert f"thread {stranger.pid} sleep: S (sleeping); waits in " in text
    finally:
        for process in (mine, other, stranger):
            process.kill()
            process.wait()
