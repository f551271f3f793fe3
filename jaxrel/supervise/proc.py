"""Processes as the kernel shows them: who is left of an attempt, and what one is at."""

import os
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_GONE = "ZX"
"""States of what is dead: a zombie waits for somebody to ask for its exit code."""


def stat(pid: int | str) -> tuple[str, int] | None:
    """State and session of a process; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, _parent, _group, session, *_ = text[text.rindex(")") + 2 :].split()
    return state, int(session)


def members(sessions: Collection[int], marks: Collection[str]) -> list[int]:
    """The living processes of `sessions`, and those with all of `marks` in their environment.

    The environment finds a child that made a session of its own, and what an agent that died
    has left behind. This process is never one of them.
    """
    return [pid for pid in _all() if pid != os.getpid() and _is_member(pid, sessions, marks)]


def kill(pids: Collection[int]) -> None:
    """SIGKILL, which also ends what is stopped."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def describe(pid: int) -> str:
    """State, and per thread its name, state and the kernel function in which it waits."""
    lines = [f"process {pid} as the kernel shows it:"]
    base = Path(f"/proc/{pid}")
    for key in ("State", "VmRSS", "Threads"):
        if value := _field(base / "status", key):
            lines.append(f"  {key}: {value}")
    with suppress(OSError):
        for task in sorted(base.glob("task/*"), key=lambda path: int(path.name)):
            name, state = _field(task / "status", "Name"), _field(task / "status", "State")
            lines.append(f"  thread {task.name} {name}: {state}; waits in {_text(task / 'wchan')}")
    return "\n".join(lines) + "\n"


def _all() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _is_member(pid: int, sessions: Collection[int], marks: Collection[str]) -> bool:
    found = stat(pid)
    if found is None or found[0] in _GONE:
        return False
    if found[1] in sessions:
        return True
    try:
        environment = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return False  # of another user, or gone
    return bool(marks) and environment.issuperset(mark.encode() for mark in marks)


def _field(path: Path, key: str) -> str:
    for line in _text(path).splitlines():
        if line.startswith(f"{key}:"):
            return " ".join(line.split()[1:])
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return "?"
