"""`jaxrel` with something going wrong in it; all the rest is the product's own.

Usage: python -m tests.supervise.faulty JSON train ..., with a list of `Fault`s, or
       python -m tests.supervise.faulty PORT launch ..., with the port to pick first
"""

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jaxrel import cli
from scripts.campaigns.workers import SMALL


@dataclass(frozen=True)
class Fault:
    """One process does one thing that it should not."""

    does: str
    """A function below."""
    attempt: int
    rank: int
    step: int = 0
    """The update, counted from 1, whose turn it is; not in `join` and `spawn`."""
    at: Literal["spawn", "join", "data", "step", "save"] = "step"
    """Before anything else, before meeting the others, instead of the batch, before the update
    is handed to the devices, or before what it made is saved."""


def train(run: Path, compiled: Path, *faults: Fault, **more: Any) -> list[str]:
    """The command line of a worker of a small run in which these happen.

    Workers compile once for all that share the folder `compiled`; `more` are further flags,
    with two underscores for a dot.
    """
    told = json.dumps([asdict(fault) for fault in faults])
    command = [sys.executable, "-m", "tests.supervise.faulty", told]
    command += ["train", "scripts/configs/tiny.yaml"]
    own = {"run.dir": run, "run.compiled": compiled, "evaluation.every": 2, "evaluation.batches": 2}
    flags = SMALL | own | {name.replace("__", "."): value for name, value in more.items()}
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    return command


def note(run: Path, fault: Fault) -> Path:
    """The file that is there, and is never changed, once it happens."""
    return run / "faults" / f"attempt-{fault.attempt}-rank-{fault.rank}-{fault.does}"


def moment(run: Path, fault: Fault) -> float:
    """When it happened, in seconds since the epoch."""
    return note(run, fault).stat().st_mtime


# What can go wrong


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps_for_ever() -> None:
    time.sleep(1e6)


def sleeps_a_while() -> None:
    time.sleep(7.0)


def raises() -> None:
    raise KeyError("no such token")


def exits_with_0() -> None:
    os._exit(0)


def exits_from_a_thread() -> None:
    """While the main thread waits for the step, which the late one has not begun."""
    threading.Timer(0.7, os._exit, (3,)).start()


def is_late() -> None:
    time.sleep(3.0)


def sleeps_till_the_host_is_back() -> None:
    """Which the test says."""
    while not Path(os.environ["JAXREL_RUN_DIR"], "back").exists():
        time.sleep(0.1)


def gets_sigterm() -> None:
    """And gives all processes time to agree where to stop, before the steps run out."""
    os.kill(os.getpid(), signal.SIGTERM)
    is_late()


def ignores_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def never_stops() -> None:
    """Neither when asked itself, nor when the others agree on a step to stop at."""
    from jaxrel.train.stop import StopSignal

    ignores_sigterm()
    StopSignal.asked = lambda self, step: False


# How it gets in


class Faults:
    """Those of this process, and which update it is at."""

    def __init__(self, told: str) -> None:
        who = tuple(int(os.environ[f"JAXREL_{x}"]) for x in ("ATTEMPT", "PROCESS_ID"))
        faults = [Fault(**values) for values in json.loads(told)]
        self._mine = [fault for fault in faults if (fault.attempt, fault.rank) == who]
        self._calls = {"data": 0, "step": 0}

    def reached(self, at: str) -> None:
        """The process is at this place; in `data` and `step`, for one update more."""
        if at in self._calls:
            self._calls[at] += 1
        for fault in self._mine:
            if fault.at == at and fault.step == self._calls.get(at, self._calls["step"]):
                file = note(Path(os.environ["JAXREL_RUN_DIR"]), fault)
                file.parent.mkdir(exist_ok=True)
                file.touch(exist_ok=False)
                globals()[fault.does]()

    def get_in(self) -> None:
        """From now on the training loop comes by here."""
        from jaxrel.checkpoint import Checkpointer
        from jaxrel.data.feed import GroupFeed
        from jaxrel.train import run
        from jaxrel.train.recorder import Recorder
        from jaxrel.train.step import TrainStep

        self._before(TrainStep, "__call__", lambda *_: self.reached("step"))
        self._before(GroupFeed, "__next__", lambda *_: self.reached("data"))
        self._before(Recorder, "resumed", self._count_from)
        self._before(Checkpointer, "save", lambda *_: self.reached("save"))
        self._before(run, "joined", lambda *_: self.reached("join"))

    def _count_from(self, recorder: Any, step: int, *_: Any) -> None:
        self._calls = dict.fromkeys(self._calls, step)

    def _before(self, owner: Any, name: str, act: Callable[..., None]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            act(*args)
            return original(*args, **kwargs)

        setattr(owner, name, patched)


def main() -> None:
    """As `jaxrel` does; ends the process."""
    told = sys.argv.pop(1)
    if sys.argv[1] == "train":
        faults = Faults(told)
        faults.reached("spawn")
        faults.get_in()
    else:
        from jaxrel.supervise import launch

        ports, fresh = iter([int(told)]), launch.fresh_ports()
        launch.fresh_ports = lambda: lambda: next(ports, 0) or fresh()
    cli.command()


if __name__ == "__main__":
    main()
