"""The arms of `recovery`: jobs that are started, killed and started again, and their marks.

A folder of prepared starts holds a run of jaxrel and a directory of the baseline, each with a
checkpoint. Every arm works on a copy, but finds the compiled programs where they are: JAX's
key of a program holds the name of the cache's directory, so it would not know them elsewhere.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import marks
from benchmarks.processes import Job, alive
from jaxrel.events import FailureDetected, Record, StepCompleted, WorkerStarted
from jaxrel.exit_codes import UsageError
from jaxrel.ledger.reader import highest_attempt, read
from jaxrel.supervise.ports import fresh_ports

PROCESSES, DEVICES = 2, 4
"""Of a job, and simulated in each."""
STEPS = 3
"""Complete in an attempt before a process is killed."""
DEADLINE_S = 600.0
"""For anything that is waited for."""
_LOOP = Path(__file__).with_name("bare_restart.sh")
_COMMAND = (sys.executable, "-m", "jaxrel.cli")
_free_port = fresh_ports()


@dataclass(frozen=True)
class Arm:
    """How a job is run; Python code that replaces parts of it makes an ablation."""

    flags: tuple[str, ...] = ()
    """Of `jaxrel train`."""
    launcher: str = ""
    """Run in the leader before it starts."""
    worker: str = ""
    """Run in each worker before it starts."""

    def command(self, config: Path, run: Path, compiled: Path, grace_s: int = 0) -> list[str]:
        """The supervised job."""
        launch = [*_patched(self.launcher), "launch", "--hosts", str(PROCESSES)]
        launch += ["--cpu-devices", str(DEVICES), "--grace", str(grace_s), "--"]
        train = [*_patched(self.worker), "train", str(config), "--run.dir", str(run)]
        return [*launch, *train, "--run.compiled", str(compiled), *self.flags]


@dataclass(frozen=True)
class Measured:
    """What a start or a recovery took, part by part."""

    wall_s: dict[str, float]
    cpu_s: dict[str, float]
    """Of all processes of the job."""
    compiled: int
    """Programs that were not in the cache."""
    facts: dict[str, object] = field(default_factory=dict)
    """What else was seen."""


def prepare(config: Path, flags: Sequence[str], folder: Path) -> None:
    """Make the prepared start `run` below `folder`."""
    run = folder / "run"
    command = Arm(tuple(flags)).command(config, run, _compiled(run), grace_s=600)
    for attempt in (1, 2):  # the second one compiles what only a resumption needs
        with Job(command, folder / "log") as job:
            job.until(lambda n=attempt: _complete(_records(run), n), DEADLINE_S)
            job.process.send_signal(signal.SIGTERM)  # it saves where it is
            job.process.wait(DEADLINE_S)


def prepare_loop(folder: Path) -> None:
    """Make the prepared start `loop` of the baseline beside `run`."""
    loop = folder / "loop"
    loop.mkdir()
    for times in (1, 2):
        with Job(_loop(folder, loop, times * STEPS), folder / "log") as job:
            if job.until(lambda n=times: _exits(loop)[n - 1], DEADLINE_S) != "0 0":
                raise RuntimeError(f"the baseline cannot be prepared:\n{job.tail()}")


def start(arm: Arm, config: Path, prepared: Path, folder: Path) -> Measured:
    """A plain start: from the launch to the first step."""
    run, compiled = _copy(prepared / "run", folder), _compiled(prepared / "run")
    attempt, before = highest_attempt(run) + 1, _programs(compiled)
    with Job(arm.command(config, run, compiled), folder / "log") as job:
        found = job.until(lambda: marks.of_start(_records(run), attempt, job.started), DEADLINE_S)
        job.sampled(found[-1][1])
    return _measured(found, job, _programs(compiled) - before)


def recover(arm: Arm, config: Path, prepared: Path, folder: Path, rank: int) -> Measured:
    """SIGKILL of `rank` in a running job, to the first new step."""
    run, compiled = _copy(prepared / "run", folder), _compiled(prepared / "run")
    attempt = highest_attempt(run) + 1
    with Job(arm.command(config, run, compiled), folder / "log") as job:
        job.until(lambda: _complete(_records(run), attempt), DEADLINE_S)
        before, killed = _programs(compiled), _kill(_pid(_records(run), attempt, rank))
        found = job.until(lambda: marks.of_recovery(_records(run), attempt, killed), DEADLINE_S)
        job.sampled(found[-1][1])
        named = [r.event for r in _records(run) if isinstance(r.event, FailureDetected)]
    facts = {"killed": rank, "named": [f"{e.kind} of rank {e.rank}" for e in named]}
    return _measured(found, job, _programs(compiled) - before, facts)


def loop(prepared: Path, folder: Path, rank: int, limit_s: float) -> Measured:
    """The same with the baseline; after `limit_s` the survivor is ended from outside."""
    directory = _copy(prepared / "loop", folder)
    for path in directory.glob("marks-*"):
        path.unlink()
    compiled = _compiled(prepared / "loop")
    with Job(_loop(prepared, directory, 10**6), folder / "log") as job:
        pids = job.until(lambda: _running(directory), DEADLINE_S)
        before, killed, survivor = _programs(compiled), _kill(pids[rank]), pids[1 - rank]
        while not (capped := time.time() - killed > limit_s) and alive(survivor):
            time.sleep(0.05)
        survived = time.time() - killed
        if capped:
            _kill(survivor)
        found = job.until(lambda: marks.of_loop(_told(directory), killed), DEADLINE_S)
        job.sampled(found[-1][1])
    exits = _exits(directory)
    facts = {"killed": rank, "survivor_s": survived, "capped": capped, "exits": exits}
    return _measured(found, job, _programs(compiled) - before, facts)


def _patched(code: str) -> list[str]:
    """The `jaxrel` command, after some code that replaces parts of it."""
    if not code:
        return list(_COMMAND)
    return [sys.executable, "-c", f"{code}\nfrom jaxrel.cli import command\ncommand()"]


def _loop(prepared: Path, directory: Path, until: int) -> list[str]:
    """The baseline in `directory`, to step `until`."""
    flags = {
        "config": prepared / "run" / "config.yaml",  # of the same model, batch and optimizer
        "compiled": _compiled(prepared / "loop"),
        "devices": DEVICES,
        "until": until,
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    return ["bash", str(_LOOP), sys.executable, str(directory), str(_free_port()), *words]


def _copy(prepared: Path, folder: Path) -> Path:
    """All but the compiled programs."""
    apart = shutil.ignore_patterns("compiled")
    return Path(shutil.copytree(prepared, folder / prepared.name, ignore=apart))


def _compiled(directory: Path) -> Path:
    return directory / "compiled"


def _programs(compiled: Path) -> int:
    """How many are kept."""
    return sum(1 for _ in compiled.glob("**/*-cache"))


def _kill(pid: int) -> float:
    """SIGKILL, if it still runs; when."""
    killed = time.time()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return killed


def _measured(
    found: list[marks.Mark], job: Job, compiled: int, facts: dict[str, object] | None = None
) -> Measured:
    cpu = marks.cpu_of_parts(found, job.samples)
    return Measured(marks.durations(found), cpu, compiled, facts or {})


def _records(run: Path) -> list[Record]:
    """Of the ledger. Raises LookupError while there is none."""
    try:
        return read(run).records
    except UsageError as error:
        raise LookupError(str(error)) from None


def _complete(records: Sequence[Record], attempt: int) -> None:
    """Raises LookupError until `attempt` has made some steps."""
    own = [r for r in records if r.attempt == attempt and isinstance(r.event, StepCompleted)]
    if len(own) < STEPS:
        raise LookupError(f"{len(own)} steps of attempt {attempt} are complete")


def _pid(records: Sequence[Record], attempt: int, rank: int) -> int:
    return next(
        r.event.pid
        for r in records
        if r.attempt == attempt and isinstance(r.event, WorkerStarted) and r.event.process == rank
    )


def _told(directory: Path) -> list[str]:
    """What the baseline's loop and its process 0 have said."""
    paths = (directory / "marks-loop", directory / "marks-0")
    return [line for path in paths if path.exists() for line in path.read_text().splitlines()]


def _exits(directory: Path) -> list[str]:
    """Exit codes of both processes of the baseline, for each time that they ran."""
    lines = (line.split(maxsplit=2) for line in _told(directory))
    return [line[2] for line in lines if line[1] == "ended"]


def _running(directory: Path) -> list[int]:
    """The baseline's processes. Raises LookupError until it has made some steps."""
    if sum(" step " in line for line in _told(directory)) < STEPS:
        raise LookupError("the baseline has not made its first steps")
    paths = (directory / f"marks-{process}" for process in range(PROCESSES))
    return [int(path.read_text().split("\n", 1)[0].split()[2]) for path in paths]
