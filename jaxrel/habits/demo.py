"""`jaxrel demo`: the whole loop on this machine, and the proof that nothing was lost.

A run on 2 processes of 4 devices has one process killed and one stopped for ever, is shrunk to
one process, grown to 8 devices and finished; another run is left alone. Both must end in the
same bits, and where the time went is in the report.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from jaxrel.events import FailureDetected, Finished, StepCompleted, WorkerStarted
from jaxrel.exit_codes import ExitCode, FailedError, UsageError
from jaxrel.ledger.reader import Journal, read
from jaxrel.ledger.summary import Summary, summarize
from jaxrel.report.terminal import show

STEPS = 60
_POLL_S = 0.1
_PLAIN_EVERY = 10
"""Steps between lines where the output is no terminal."""
_DEADLINE_S = 600.0
"""For one job of the demo, on a machine however slow."""


@dataclass(frozen=True)
class Harm:
    """What is done to a run once `step` steps are complete."""

    step: int
    name: str
    """SIGKILL or SIGSTOP to the process of `rank`, SIGTERM to the leader."""
    rank: int = 0


@dataclass(frozen=True)
class Job:
    """One `jaxrel launch`."""

    what: str
    processes: int
    devices: int
    """Of each process."""
    harms: tuple[Harm, ...] = ()
    exit: int = 0


TROUBLED = (
    Job(
        "2 processes x 4 devices", 2, 4,
        (Harm(17, "SIGKILL", 1), Harm(28, "SIGSTOP", 0), Harm(36, "SIGTERM")), ExitCode.PREEMPTED,
    ),
    Job("shrunk to 1 process x 4 devices", 1, 4, (Harm(46, "SIGTERM"),), ExitCode.PREEMPTED),
    Job("grown to 1 process x 8 devices", 1, 8),
)  # fmt: skip
ALONE = Job("left alone: 1 process x 8 devices", 1, 8)


def demo(directory: str | None = None, console: Console | None = None) -> int:
    """Run it in `directory` (default: a new temporary one); 0 only when the bits are equal.

    Raises UsageError when `directory` holds something, FailedError when a job does not end as
    it should.
    """
    folder = Path(tempfile.mkdtemp(prefix="jaxrel-demo-") if directory is None else directory)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--dir: got {str(directory)!r}: expected a new or empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    console = console or Console(highlight=False, soft_wrap=True)
    with as_file(files("jaxrel") / "configs" / "tiny.yaml") as config:
        shown = _Screen(console)
        with shown.progress:
            _Jobs(folder, config, shown).run("undisturbed", (ALONE,))
            _Jobs(folder, config, shown).run("run", TROUBLED)
    alone, run = (summarize(read(folder / name)) for name in ("undisturbed", "run"))
    show(run, console, time.time())
    return verdict(alone, run, read(folder / "run"), folder, console)


class _Screen:
    """A bar a job on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(  # only the bar may shrink
            TextColumn("{task.description}"), TextColumn("{task.completed}/{task.total}"),
            BarColumn(), TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(table_column=Column(no_wrap=True)), console=console,
            disable=not console.is_terminal,
        )  # fmt: skip

    def begin(self, what: str) -> None:
        self._what, self._shown = what, -1
        self._task = self.progress.add_task(what, total=STEPS, text="starts and compiles")
        if not self.console.is_terminal:
            self.note("starts and compiles")

    def step(self, step: int, loss: float | None) -> None:
        text = "" if loss is None else f"loss {loss:.4f}"
        self.progress.update(self._task, completed=step, text=text)
        if not self.console.is_terminal and step // _PLAIN_EVERY > self._shown // _PLAIN_EVERY:
            self.note(f"step {step}/{STEPS}  {text}")
        self._shown = step

    def note(self, text: str) -> None:
        self.console.print(f"{self._what}: {text}", markup=False)

    def end(self) -> None:
        self.progress.stop_task(self._task)


class _Jobs:
    """The jobs of one run directory, one after the other."""

    def __init__(self, folder: Path, config: Path, screen: _Screen) -> None:
        self.folder, self.config, self.screen = folder, config, screen

    def run(self, name: str, jobs: tuple[Job, ...]) -> None:
        """Carry out `jobs` in the run directory `name`."""
        for number, job in enumerate(jobs):
            log = self.folder / f"{name}-{number}.log"
            self.screen.begin(job.what)
            with self._launch(self.folder / name, job, log) as leader:
                self._watch(leader, self.folder / name, job, log)
            self.screen.end()

    @contextmanager
    def _launch(self, run: Path, job: Job, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        jaxrel = [sys.executable, "-m", "jaxrel.cli"]
        launch = ["--hosts", job.processes, "--cpu-devices", job.devices, "--hang-floor", 10]
        train = {
            "run.dir": run, "run.steps": STEPS, "run.compiled": self.folder / "compiled",
            "checkpoint.interval": 10, "evaluation.every": 20, "evaluation.batches": 2,
        }  # fmt: skip
        flags = [word for key, value in train.items() for word in (f"--{key}", str(value))]
        command = [*jaxrel, "launch", *map(str, launch), "--", *jaxrel, "train", str(self.config)]
        clean = {name: v for name, v in os.environ.items() if not name.startswith("JAXREL_")}
        with log.open("wb") as output:
            leader = subprocess.Popen(
                [*command, *flags], env=clean, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            yield leader
        finally:
            for _ in range(2):  # the second signal does not wait for a save
                if leader.poll() is None:
                    leader.terminate()
                    time.sleep(0.2)
            leader.wait()

    def _watch(self, leader: subprocess.Popen[bytes], run: Path, job: Job, log: Path) -> None:
        """Show the job's progress and do it harm, until it ends."""
        before = read(run) if (run / "ledger").is_dir() else None
        told = len(_failures(before)) if before else 0
        harms, ends = list(job.harms), time.monotonic() + _DEADLINE_S
        while leader.poll() is None:
            if time.monotonic() > ends:
                raise FailedError(f"{job.what}: not finished after {_DEADLINE_S:g} s: see {log}")
            time.sleep(_POLL_S)
            if not (run / "ledger").is_dir():
                continue
            journal = read(run)
            for failure in _failures(journal)[told:]:
                self.screen.note(f"found by the leader: {failure.detail}")
                told += 1
            if (latest := _latest_step(journal)) is None:
                continue
            self.screen.step(latest.step, latest.loss)
            if harms and latest.step >= harms[0].step and _fresh(journal, before):
                self._harm(harms.pop(0), journal, leader)
                before = journal
        if leader.returncode != job.exit or harms:
            raise FailedError(f"{job.what}: ended with {leader.returncode}: see {log}")

    def _harm(self, harm: Harm, journal: Journal, leader: subprocess.Popen[bytes]) -> None:
        if harm.name == "SIGTERM":
            self.screen.note("SIGTERM to the leader: saves, and leaves")
            leader.terminate()
            return
        started = [r.event for r in journal.records if isinstance(r.event, WorkerStarted)]
        pid = next(e.pid for e in reversed(started) if e.process == harm.rank)
        self.screen.note(f"{harm.name} to rank {harm.rank}")
        os.kill(pid, getattr(signal, harm.name))


def _failures(journal: Journal) -> list[FailureDetected]:
    return [r.event for r in journal.records if isinstance(r.event, FailureDetected)]


def _latest_step(journal: Journal) -> StepCompleted | None:
    steps = (r.event for r in reversed(journal.records) if isinstance(r.event, StepCompleted))
    return next(steps, None)


def _fresh(journal: Journal, before: Journal | None) -> bool:
    """Whether a process that was not yet there, or not yet harmed, has completed a step."""
    old = max((r.attempt for r in before.records), default=0) if before else 0
    now = max((r.attempt for r in journal.records if isinstance(r.event, StepCompleted)), default=0)
    return now > old


def verdict(alone: Summary, run: Summary, journal: Journal, folder: Path, console: Console) -> int:
    """Compare the two runs and print what holds; 0 when everything does."""
    one, other = alone.document, run.document
    kinds = [(f["kind"], f["rank"]) for f in other["failures"] if f["kind"] != "preempted"]
    devices = [a["devices"] for a in other["attempts"]]
    losses = [_losses(read(folder / "undisturbed")), _losses(journal)]
    digest = one["final_state_digest"]
    finished = [r.event for r in journal.records if isinstance(r.event, Finished)]
    facts: dict[str, bool] = {
        "rank 1 killed, rank 0 stopped for ever: each found and named":
            kinds == [("signal", 1), ("stopped", 0)],
        "resumed on the same devices, on half of them, and on all of them in one process":
            devices == [8, 8, 8, 4, 8],
        f"{STEPS} steps, each once in the run that counts; every loss equals the other run's":
            losses[0] == losses[1] and list(losses[1]) == list(range(1, STEPS + 1)),
        "the held-out losses are equal":
            _held_out(one) == _held_out(other) != [],
        "the final digests are equal":
            bool(finished) and digest == other["final_state_digest"] == finished[-1].state_digest,
    }  # fmt: skip
    table = Table("run", "devices of its attempts", Column("final state digest", no_wrap=True))
    table.add_row("left alone", "8", digest)
    table.add_row(
        "killed, stopped, shrunk, grown", " ".join(map(str, devices)), other["final_state_digest"]
    )
    console.print(table)
    for fact, holds in facts.items():
        console.print(f"{'yes' if holds else 'NO ':<4} {fact}")
    console.print(
        f"runs: {folder}; look again with: {sys.executable} -m jaxrel report {folder / 'run'}"
    )
    return ExitCode.OK if all(facts.values()) else 1


def _held_out(document: dict[str, Any]) -> list[tuple[int, float]]:
    return [(e["step"], e["loss"]) for e in document["evaluations"]]


def _losses(journal: Journal) -> dict[int, float | None]:
    """Loss by step; of a step done again, the later one, which the finished run rests on."""
    found = {
        r.event.step: r.event.loss for r in journal.records if isinstance(r.event, StepCompleted)
    }
    return dict(sorted(found.items()))
