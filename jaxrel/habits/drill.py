"""`jaxrel drill`: does a run of this configuration survive, with the same bits?

The configuration is run twice on this machine: undisturbed, and interrupted on purpose at
moments drawn from a seed, in steps and in saves, resized between its attempts. Every loss of the
lineage that counts in the end and every leaf of the last checkpoint must agree.

`batch.reduction: fast` promises no bits across device counts. It is the default of the library,
so a resize with it is not refused; what it does promise, the same batches in the same order, is
held by comparing losses within `TOLERANCE`, and the output says so.
"""

import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from jaxrel import config_file
from jaxrel.checkpoint.listing import TMP_SUFFIX, newest
from jaxrel.config import Config, check
from jaxrel.events import CheckpointSaved, StepCompleted
from jaxrel.exit_codes import ExitCode, FailedError, UsageError
from jaxrel.habits.agreement import first_difference, outcome
from jaxrel.ledger.lineage import RANK0
from jaxrel.ledger.reader import read
from jaxrel.ledger.summary import summarize

KINDS = ("kill", "term", "stop", "exception")
_EXITS = {
    "kill": (-signal.SIGKILL,),
    "term": (ExitCode.PREEMPTED, -signal.SIGTERM),  # the latter at the very end
    "stop": (-signal.SIGKILL,),
}
_RAISED = "raised on purpose"
"""In the log of a process that failed as it was asked to, and not by itself."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Relative difference of losses, by model.compute_dtype, that counts as agreement where bits are
not promised. Rounding made 2.4e-7 and 1.4e-4 at most (the tiny configuration, 1 and 8 devices over
200 steps, 2 and 8 over 100); from one batch to the next the loss differs by 4e-2 in the middle."""
_STOPPED_S = 1.0
"""From SIGSTOP to SIGKILL: nobody else would notice."""
_POLL_S, _LOOK_S = 0.1, 0.002
"""Between two looks at a process: at leisure, and when a moment is awaited."""
_SILENT_S = 600.0
"""A process that prints nothing for so long, neither step nor note, is given up."""


@dataclass(frozen=True)
class Drill:
    """The flags of `jaxrel drill`, as they are given."""

    config: str
    kills: int = 4
    """Interruptions."""
    kinds: str = ",".join(KINDS)
    resize: str = ""
    """Simulated CPU devices of one attempt after the other; empty leaves them as configured."""
    seed: int = 0
    directory: str | None = None
    """A new or empty folder for the runs; None is a temporary one, which is kept."""
    json: bool = False

    def check(self) -> Config:
        """The configuration. Raises UsageError, naming the flag or the key that cannot be used."""
        if self.kills < 1:
            raise UsageError(f"--kills: got {self.kills}: expected at least 1")
        for kind in self.kinds.split(","):
            if kind not in KINDS:
                raise UsageError(
                    f"--kinds: got {self.kinds!r}: expected some of {','.join(KINDS)}, by commas"
                )
        folder = Path(self.directory or ".")
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        if self.directory is not None and (taken or not self.directory):
            raise UsageError(f"--dir: got {self.directory!r}: expected a new or empty folder")
        config = config_file.load(self.config)
        check(config)
        for devices in self.sizes():
            self._fits(config, devices)
        if config.run.steps < 2:
            raise UsageError("run.steps: got 1: expected at least 2, to be interrupted")
        if config.job.detect or config.job.num_processes not in (None, 1):
            raise UsageError("job: expected nothing: a drill is of one process")
        return config

    def sizes(self) -> list[int]:
        """Devices by attempt, in turn; [] when they are as configured. Raises UsageError."""
        words = self.resize.split(",") if self.resize else []
        if not all(re.fullmatch("[1-9][0-9]{0,3}", word) for word in words):
            raise UsageError(f"--resize: got {self.resize!r}: expected counts such as 8,4,2")
        return [int(word) for word in words]

    def tolerance(self, config: Config) -> float | None:
        """How far losses may differ; None where the bits must be the same."""
        exact = config.batch.reduction == "invariant" or len(set(self.sizes())) <= 1
        return None if exact else TOLERANCE[config.model.compute_dtype]

    def _fits(self, config: Config, devices: int) -> None:
        """Refuse what `jaxrel train` would, before anything is started."""
        mesh = config.mesh
        rest = mesh.fsdp * mesh.tensor * math.prod(mesh.axes.values())
        if rest < 1:
            raise UsageError("--resize: expected mesh.data to be the only degree that may be -1")
        if devices % rest:
            raise UsageError(
                f"--resize: got {devices}: expected multiples of {rest}, which is the product of"
                " the degrees besides mesh.data"
            )
        check(replace(config, mesh=replace(mesh, data=devices // rest, cpu_devices=devices)))


@dataclass(frozen=True)
class Interruption:
    """What is to be done to one attempt; all of it drawn from the seed."""

    kind: str
    where: str
    """`step`: once `step` or a later one is complete; `save`: in the first save from `step` on."""
    step: int
    fraction: float
    """Of a usual step, or save, that is let pass first, 0 to 1."""


@dataclass(frozen=True)
class Attempt:
    """What was done to an attempt in the end: `kind` and `where` are None if nothing."""

    kind: str | None = None
    where: str | None = None


def drill(asked: Drill) -> int:
    """Run, interrupt, compare and tell; 0 only when the two runs agree, else 1.

    Raises UsageError before anything is started, FailedError when a process does not end as it
    should, or when the run was finished before the first interruption came.
    """
    config = asked.check()
    folder = Path(asked.directory or tempfile.mkdtemp(prefix="jaxrel-drill-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    say = Console(stderr=True, highlight=False, soft_wrap=True).print
    runs = _Runs(asked, config.run.steps, folder, say)
    say("undisturbed: starts", markup=False)
    runs.undisturbed()
    attempts = runs.interrupted(draw(asked, config))
    if attempts[0].kind is None:
        raise FailedError(f"nothing was interrupted, the run is too short: see {folder}")
    document = verdict(folder, attempts, config.run.steps, asked.tolerance(config))
    return tell(document, Console(highlight=False, soft_wrap=True), as_json=asked.json)


def draw(asked: Drill, config: Config) -> list[Interruption]:
    """The interruptions of a seed, by rising step: kinds by turns, every second one in a save."""
    rng, last, kinds = random.Random(asked.seed), config.run.steps, []
    interval = config.checkpoint.interval
    spare = interval if isinstance(interval, int) else last // 4  # so that a save is to come
    while len(kinds) < asked.kills:
        kinds += rng.sample(asked.kinds.split(","), len(asked.kinds.split(",")))
    steps = sorted(rng.randint(1, max(1, last - spare)) for _ in range(asked.kills))
    found, in_save = [], rng.random() < 0.5
    for kind, step in zip(kinds, steps, strict=False):
        where = "step"
        if kind != "exception":
            where, in_save = ("save" if in_save else "step"), not in_save
        found.append(Interruption(kind, where, step, rng.random()))
    return found


class _Worker:
    """A process of `jaxrel train`; its progress is read off what it prints."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        clean = {name: x for name, x in os.environ.items() if not name.startswith("JAXREL_")}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=clean, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self.log, self._reader = log, log.open("rb")
        self.step = 0
        """The last one that it has shown; 0 before the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.close()

    def wait(self, until: Callable[[], bool] | None = None) -> bool:
        """Wait until `until()` holds, or for its end: False then. Raises FailedError."""
        heard = time.monotonic()
        while self.process.poll() is None:
            if new := self._reader.read():
                heard = time.monotonic()
                shown = re.findall(rb"^step (\d+)/", new, re.MULTILINE)
                self.step = int(shown[-1]) if shown else self.step
            if until is not None and until():
                return True
            if time.monotonic() - heard > _SILENT_S:
                raise FailedError(f"a run printed nothing for {_SILENT_S:g} s: see {self.log}")
            time.sleep(_POLL_S if until is None else _LOOK_S)
        return False

    def end(self, *codes: int) -> int:
        """Wait for its end; its exit code, one of `codes`. Raises FailedError for another."""
        self.wait()
        code = self.process.returncode
        if code not in codes:
            lines = self.log.read_text(errors="replace").strip().splitlines() or [""]
            raise FailedError(f"a run ended with {code}: {lines[-1]} (see {self.log})")
        return code


class _Runs:
    """The two runs of a drill, in `folder`."""

    def __init__(self, asked: Drill, steps: int, folder: Path, say: Callable[..., None]) -> None:
        self.asked, self.steps, self.folder, self.say = asked, steps, folder, say

    def undisturbed(self) -> None:
        with self._start("undisturbed", 0) as worker:
            worker.end(ExitCode.OK)

    def interrupted(self, interruptions: Sequence[Interruption]) -> list[Attempt]:
        """What was done to each attempt of the other run, which is finished then.

        An interruption that comes too late, to a run that is finished, is the last attempt.
        """
        attempts: list[Attempt] = []
        usual = _usual(self.folder / "undisturbed")
        for number, plan in enumerate(interruptions):
            what = f"{plan.kind} in a {plan.where} from step {plan.step} on"
            self.say(f"attempt {number + 1}: {what}", markup=False)
            if not self._interrupt(number, plan, usual[plan.where]):
                left = len(interruptions) - number
                self.say(f"too late: finished, {left} interruptions left out", markup=False)
                return [*attempts, Attempt()]
            attempts.append(Attempt(plan.kind, plan.where))
        self.say(f"attempt {len(attempts) + 1}: to the end", markup=False)
        with self._start("run", len(attempts)) as worker:
            worker.end(ExitCode.OK)
        return [*attempts, Attempt()]

    def _interrupt(self, number: int, plan: Interruption, usual_s: float) -> bool:
        """Start an attempt and interrupt it; False if it was finished before."""
        folder = self.folder / "run" / "checkpoints"
        if plan.kind == "exception":
            step = max(plan.step, (newest(folder) or 0) + 1)  # one that is still to come
            with self._start("run", number, {"chaos.raise_at_step": step}) as worker:
                code = worker.end(ExitCode.OK, ExitCode.FAILED)
            if code and _RAISED not in worker.log.read_text(errors="replace"):
                raise FailedError(f"a run failed by itself: see {worker.log}")
            return code != ExitCode.OK
        before = _saves(folder)
        with self._start("run", number) as worker:

            def reached() -> bool:
                if plan.where == "step":
                    return worker.step >= plan.step
                return any(_step_of(name) >= plan.step for name in _saves(folder) - before)

            if worker.wait(reached):
                due = time.monotonic() + plan.fraction * usual_s
                # The last step is the last chance: its save is still to come.
                worker.wait(lambda: time.monotonic() >= due or worker.step >= self.steps)
                _harm(worker.process, plan.kind)
            return worker.end(ExitCode.OK, *_EXITS[plan.kind]) != ExitCode.OK

    def _start(self, run: str, number: int, more: dict[str, Any] | None = None) -> _Worker:
        """An attempt of `run`; nothing of it is written outside of `folder`."""
        sizes, where = self.asked.sizes(), self.folder / run
        flags: dict[str, Any] = {
            "run.dir": where, "run.print_every": 1, "run.compiled": self.folder / "compiled",
            "checkpoint.dir": where / "checkpoints", **(more or {}),
        }  # fmt: skip
        if sizes:
            flags |= {"mesh.cpu_devices": sizes[number % len(sizes)], "mesh.data": -1}
        command = [sys.executable, "-m", "jaxrel.cli", "train", self.asked.config]
        command += [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        return _Worker(command, self.folder / f"{run}-{number + 1}.log")


def _harm(process: subprocess.Popen[bytes], kind: str) -> None:
    if kind == "stop":
        process.send_signal(signal.SIGSTOP)
        time.sleep(_STOPPED_S)
    process.send_signal(signal.SIGTERM if kind == "term" else signal.SIGKILL)


def _saves(folder: Path) -> set[str]:
    """Names of the checkpoints in `folder`, complete ones and those on their way."""
    names = os.listdir(folder) if folder.is_dir() else []
    return {name for name in names if name.isdigit() or TMP_SUFFIX in name}


def _step_of(name: str) -> int:
    return int(name.partition(".")[0])


def _usual(run: Path) -> dict[str, float]:
    """Seconds that a step and a save of a finished run take, in the middle."""
    records = read(run).records
    ends = [r.time_us / 1e6 for r in records if isinstance(r.event, StepCompleted)]
    saves = [r.event.seconds for r in records if isinstance(r.event, CheckpointSaved)]
    steps = [b - a for a, b in itertools.pairwise(ends)]
    return {"step": statistics.median(steps), "save": statistics.median(saves or [0.0])}


def verdict(
    folder: Path, attempts: Sequence[Attempt], steps: int, tolerance: float | None
) -> dict[str, Any]:
    """Compare the two finished runs in `folder`: the document of `jaxrel drill --json`."""
    one, other = (outcome(folder / name, steps) for name in ("undisturbed", "run"))
    difference = first_difference(one, other, steps, tolerance)
    within = f"losses within {tolerance}, relative: no bits are promised"
    return {
        "ok": difference is None,
        "compared": "every loss and every leaf, bit by bit" if tolerance is None else within,
        "rows": rows(folder / "run", attempts, steps),
        "first_difference": difference,
        "steps": steps,
        "state_digests": [one.state_digest, other.state_digest],
        "dir": str(folder),
    }


def rows(run: Path, attempts: Sequence[Attempt], steps: int) -> list[dict[str, Any]]:
    """What became of each attempt, by the ledger; `step` is the last one that it completed.

    An attempt that found the run complete has left no record, and has unknown (None) devices.
    """
    journal = read(run)
    known = {entry["id"]: entry for entry in summarize(journal).document["attempts"]}
    reached: dict[int, int] = {}
    for r in journal.records:
        if isinstance(r.event, StepCompleted) and r.source == RANK0:
            reached[r.attempt] = max(r.event.step, reached.get(r.attempt, 0))
    found: list[dict[str, Any]] = []
    for number, attempt in enumerate(attempts, 1):
        entry = known.get(number, {"resumed_from": steps, "devices": None})
        if found:
            found[-1]["steps_lost"] = max(0, found[-1]["step"] - entry["resumed_from"])
        found.append(
            {
                "attempt": number, "kind": attempt.kind, "where": attempt.where,
                "step": reached.get(number, entry["resumed_from"]), "devices": entry["devices"],
                "resumed_from": entry["resumed_from"], "steps_lost": 0,
            }
        )  # fmt: skip
    return found


def tell(document: dict[str, Any], console: Console, *, as_json: bool = False) -> int:
    """Print what came of a drill, in one JSON document or for a person; its exit code."""
    if as_json:
        console.out(json.dumps(document, allow_nan=False))
    else:
        _show(document, console)
    return ExitCode.OK if document["ok"] else 1


def _show(document: dict[str, Any], console: Console) -> None:
    table = Table("attempt", "interrupted by", "at step", "devices", "resumed from", "steps lost")
    for row in document["rows"]:
        how = row["kind"] or "(finished)"
        how += " in a save" if row["where"] == "save" else ""
        cells = (row[name] for name in ("step", "devices", "resumed_from", "steps_lost"))
        texts = ("unknown" if cell is None else str(cell) for cell in cells)
        table.add_row(str(row["attempt"]), how, *texts)
    console.print(table)
    for name, digest in zip(("undisturbed", "interrupted"), document["state_digests"], strict=True):
        console.print(f"{name}: state digest {digest}", markup=False)
    console.print(f"compared: {document['compared']}", markup=False)
    difference = document["first_difference"]
    if difference is None:
        console.print(f"yes  {document['steps']} steps agree", markup=False)
    else:
        leaf = difference["leaf"] or "none is known"
        console.print(f"NO   first differing step {difference['step']}, leaf {leaf}", markup=False)
    console.print(f"runs: {document['dir']}", markup=False)
