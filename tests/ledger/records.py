"""Short ways to say what is in a ledger."""

from pathlib import Path
from typing import Any

from jaxrel.events import (
    AttemptStarted,
    CheckpointSaved,
    Evaluated,
    Event,
    FailureDetected,
    PhaseBegan,
    Record,
    Resumed,
    StepCompleted,
    WorkerStarted,
)

SECOND = 1_000_000


class FakeClock:
    """A wall clock and a monotonic one, both in the hands of the test."""

    def __init__(self, wall_s: float = 1_000.0) -> None:
        self.wall, self.monotonic = round(wall_s * SECOND), 7

    def wall_us(self) -> int:
        return self.wall

    def monotonic_us(self) -> int:
        return self.monotonic

    def sleep(self, seconds: float) -> None:
        self.wall += round(seconds * SECOND)
        self.monotonic += round(seconds * SECOND)


def at(seconds: float, attempt: int, event: Event, source: str = "rank0") -> Record:
    return Record(round(seconds * SECOND), attempt, source, event)


def lead(seconds: float, attempt: int, event: Event) -> Record:
    return at(seconds, attempt, event, "leader")


def phase(seconds: float, attempt: int, name: Any, source: str = "rank0") -> Record:
    return at(seconds, attempt, PhaseBegan(name), source)


def step(seconds: float, attempt: int, number: int, **fields: Any) -> Record:
    return at(seconds, attempt, StepCompleted(number, **fields))


def resumed(seconds: float, attempt: int, number: int) -> Record:
    return at(seconds, attempt, Resumed(number, devices=8, processes=2))


def started(seconds: float, attempt: int, source: str = "rank0") -> Record:
    return at(seconds, attempt, WorkerStarted(int(source[4:]), 2, 99, "host0"), source)


def spawned(seconds: float, attempt: int) -> Record:
    return lead(seconds, attempt, AttemptStarted(["host0", "host1"], "localhost:1"))


def failed(seconds: float, attempt: int, after_s: float | None, **fields: Any) -> Record:
    event = FailureDetected("signal", 1, "host1", "killed by SIGKILL", after_s, **fields)
    return lead(seconds, attempt, event)


def evaluated(seconds: float, attempt: int, number: int, took: float, loss: float = 2.0) -> Record:
    return at(seconds, attempt, Evaluated(number, loss, rows=100, seconds=took))


def saved(seconds: float, attempt: int, number: int, blocking: float, digest: str = "aa") -> Record:
    return at(seconds, attempt, CheckpointSaved(number, blocking * 2, blocking, digest, 1000))


def write_segment(run_dir: Path, name: str, lines: list[str]) -> Path:
    """A segment made by hand."""
    (run_dir / "ledger").mkdir(exist_ok=True)
    path = run_dir / "ledger" / f"{name}.jsonl"
    path.write_text("".join(lines))
    return path
