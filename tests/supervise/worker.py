"""A small worker without JAX: steps in lockstep with its peers, saves, and fails as it is told.

Usage: python -m tests.supervise.worker JSON, with the fields of `Plan`.
"""

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from jaxrel.heartbeat import Heartbeat


@dataclass
class Plan:
    """What to do."""

    steps: int = 10
    step_s: float = 0.02
    faults: list[str] = field(default_factory=list)
    """Of each attempt, methods of `Job`."""
    rank: int = 0
    """Of whom the faults are; -1 of all."""
    at: int = 2
    """Completed steps before the first,"""
    every: int = 2
    """and between one and the next."""
    slow_start_s: float = 0.0
    """Of rank 1."""
    dumps: bool = True
    listens: bool = False
    """Whether rank 0 listens on the coordinator's port."""


class Job:
    """This process's part."""

    def __init__(self, plan: Plan) -> None:
        environment = os.environ
        self.plan, self.beats = plan, Heartbeat.from_environment()
        self.run = Path(environment["JAXREL_RUN_DIR"])
        self.attempt = int(environment["JAXREL_ATTEMPT"])
        self.rank = int(environment["JAXREL_PROCESS_ID"])
        self.processes = int(environment["JAXREL_NUM_PROCESSES"])
        self.meeting = self.run / "meeting" / str(self.attempt)
        self.meeting.mkdir(parents=True, exist_ok=True)

    def main(self) -> None:
        self.beats.beat("start")
        if self.plan.dumps:
            stacks = self.run / "stacks" / f"attempt-{self.attempt}-rank-{self.rank}.txt"
            stacks.parent.mkdir(exist_ok=True)
            faulthandler.register(signal.SIGUSR1, stacks.open("a"), all_threads=True)
            self.beats.can_dump()
        signal.signal(signal.SIGTERM, self.preempted)
        if self.rank == 1:
            time.sleep(self.plan.slow_start_s)
        if self.plan.listens and self.rank == 0:
            port = int(os.environ["JAXREL_COORDINATOR"].rpartition(":")[2])
            self.server = socket.create_server(("127.0.0.1", port))
        self.beats.beat("join")
        self.meet(0)
        saved = self.run / "saved"
        done = int(saved.read_text()) if saved.exists() else 0
        self.beats.beat("compile", done, done + 1)
        while done < self.plan.steps:
            if fault := self.fault(done):
                getattr(self, fault)()
            self.beats.beat("step", done, done + 1)
            time.sleep(self.plan.step_s)
            self.beats.beat("wait")
            self.meet(done + 1)
            done += 1
            self.beats.beat("data", done)
            if self.rank == 0:
                print(f"step {done}", flush=True)
                part = saved.with_suffix(".part")
                part.write_text(str(done))
                part.replace(saved)
        self.beats.beat("stop")
        self.meet(done + 1)
        self.beats.beat("done")

    def fault(self, done: int) -> str:
        """What goes wrong here, if anything."""
        plan, before = self.plan, self.attempt - 1
        mine = plan.rank in (self.rank, -1) and before < len(plan.faults)
        return plan.faults[before] if mine and done == plan.at + plan.every * before else ""

    def meet(self, step: int) -> None:
        """Wait until every process has come to `step`; for ever, like a collective."""
        (self.meeting / f"{step}-{self.rank}").touch()
        while not all((self.meeting / f"{step}-{r}").exists() for r in range(self.processes)):
            time.sleep(0.002)

    def preempted(self, *_: object) -> None:
        self.beats.beat("stop")
        os._exit(75)

    # Faults

    def exits_3(self) -> None:
        sys.exit(3)

    def exits_early(self) -> None:
        sys.exit(0)

    def exits_65(self) -> None:
        sys.exit(65)

    def exits_76(self) -> None:
        sys.exit(76)

    def exits_77(self) -> None:
        sys.exit(77)

    def exits_75(self) -> None:
        sys.exit(75)

    def exits_at_once(self) -> None:
        os._exit(1)

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def aborts(self) -> None:
        os.abort()

    def stopped(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def sleeps_in_step(self) -> None:
        self.beats.beat("step")
        time.sleep(1000)

    def sleeps_in_data(self) -> None:
        self.beats.beat("data")
        time.sleep(1000)

    def raises(self) -> None:
        raise KeyError("no such token")

    def runs_out(self) -> None:
        raise MemoryError("out of memory while allocating 17 GiB")

    def ignores_sigterm(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def keeps_a_child(self) -> None:
        subprocess.Popen(["sleep", "1000"])

    def leaves_children(self) -> None:
        """One in its session, one in a session of its own; then it dies."""
        for new in (False, True):
            subprocess.Popen(["sleep", "1000"], start_new_session=new)
        os._exit(1)


def main() -> None:
    job = Job(Plan(**json.loads(sys.argv[1])))
    try:
        job.main()
    except (KeyError, MemoryError, OSError) as error:
        job.beats.failed(error)
        raise SystemExit(70) from error


if __name__ == "__main__":
    main()
