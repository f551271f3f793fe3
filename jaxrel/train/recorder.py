"""What a process of a run tells others while it trains: its agent, the ledger, TensorBoard."""

import faulthandler
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import jax
import numpy as np

from jaxrel.checkpoint.checkpointer import Checkpointer
from jaxrel.checkpoint.errors import SaveFailedError
from jaxrel.checkpoint.together import from_everyone, together
from jaxrel.events import (
    CheckpointFailed,
    CheckpointRefused,
    CheckpointSaved,
    Evaluated,
    Event,
    Finished,
    LocalSaved,
    MeterStarted,
    Phase,
    PhaseBegan,
    RecordsLost,
    Resumed,
    StepCompleted,
    ThroughputDrifted,
    WorkerFailed,
    WorkerStarted,
)
from jaxrel.exit_codes import ExitCode, JaxrelError
from jaxrel.heartbeat import Heartbeat
from jaxrel.ledger import Ledger
from jaxrel.ledger.reader import highest_attempt
from jaxrel.report.tensorboard import TensorBoard
from jaxrel.throughput.meter import UNKNOWN, Throughput, ThroughputMeter

log = logging.getLogger(__name__)

SUPERVISED = "JAXREL_ATTEMPT"
"""Environment variable that a leader sets: the attempt of the run, from 1."""
WHOLE = 32
"""Groups up to which every step records all of them."""
WHOLE_EVERY = 100
"""Steps between records of all groups where there are more."""
TOP = 8


class Sink(Protocol):
    """Where rank 0's events go besides the ledger."""

    lost: int
    error: str

    def write(self, event: Event) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """One process's voice. Nothing that it does can stop the run.

    What is said before `begin` is kept, so that a run that is refused, or complete already,
    leaves nothing on disk.
    """

    def __init__(self) -> None:
        self.heartbeat = Heartbeat.from_environment()
        self.sinks: list[Sink] = []
        self._ledger: Ledger | None = None
        self._early: list[tuple[float, Event]] = []
        self._process, self._processes = 0, 1
        self._flops = UNKNOWN

    def begin(
        self,
        run_dir: str | os.PathLike[str],
        process: int = 0,
        processes: int = 1,
        attempt: int | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        """Open this process's segment of the ledger in `run_dir`.

        `attempt` is that of the run, the same on every process; None lets the ledger count.
        `sinks` are for process 0. Raises UsageError when the ledger cannot be written.
        """
        self._process, self._processes = process, processes
        self._ledger = Ledger(run_dir, source=f"rank{process}", attempt=attempt)
        self.sinks = list(sinks) if process == 0 else []
        host = os.environ.get("JAXREL_HOST") or socket.gethostname()
        now = time.monotonic()
        first = self._early[0][0] if self._early else now
        self._early.insert(0, (first, WorkerStarted(process, processes, os.getpid(), host)))
        for at, event in self._early:
            self._ledger.write(event, ago_s=now - at)
        self._early = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, GeneratorExit):
            code = int(error.code if isinstance(error, JaxrelError) else ExitCode.FAILED)
            line = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
            self.write(WorkerFailed(line, code))
            if code != ExitCode.PREEMPTED:
                self.heartbeat.failed(error)
        for sink in self.sinks:
            sink.close()
            if sink.lost:
                self.write(RecordsLost(type(sink).__name__, sink.lost, sink.error))
        if self._ledger is not None:
            self._ledger.close()
        self._ledger, self.sinks = None, []  # what is said from now on reaches nobody

    def write(self, event: Event) -> None:
        """An event, to the ledger and, on process 0, to every sink."""
        if self._ledger is None:
            self._early.append((time.monotonic(), event))
            return
        self._ledger.write(event)
        for sink in self.sinks:
            sink.write(event)

    def phase(self, phase: Phase, completed: int | None = None) -> None:
        """From here on this process is at `phase`."""
        self.write(PhaseBegan(phase))
        self.heartbeat.beat("data" if phase == "train" else phase, completed, completed)

    def at(self, place: str, completed: int, dispatched: int) -> None:
        """Where in the loop the process is: data, step or wait."""
        self.heartbeat.beat(place, completed, dispatched)

    def resumed(self, step: int, degrees: dict[str, int], digest: str | None) -> None:
        """The state is ready; `step` updates are complete."""
        self.write(Resumed(step, prod(degrees.values()), self._processes, degrees, digest))

    def step(
        self,
        step: int,
        loss: float | None,
        grad_norm: float | None = None,
        *,
        learning_rate: float | None = None,
        tokens: int | None = None,
        groups: dict[str, Any] | None = None,
        throughput: Throughput | None = None,
    ) -> None:
        """Update `step` is complete. `groups` has per-group arrays [G] by name."""
        if self._process != 0:
            return
        told = {name: digest_of(values, step) for name, values in (groups or {}).items()}
        event = StepCompleted(step, loss, grad_norm, learning_rate, tokens, told)
        if throughput is not None:
            event = replace(event, **_timed(throughput))
        self.write(event)
        if throughput is not None and (drifted := throughput.drifted):
            self.write(ThroughputDrifted(step, drifted.before_s, drifted.now_s))

    def metered(self, meter: ThroughputMeter) -> None:
        """What MFU means from here on, where that is not on record yet."""
        if self._process == 0 and meter.flops is not self._flops:
            self._flops, peak, flops = meter.flops, meter.peak.flops, meter.flops
            self.write(MeterStarted(meter.definition, peak, flops.model, flops.hardware))

    def evaluated(self, step: int, loss: float, rows: int, seconds: float) -> None:
        """The held-out loss after `step` updates."""
        if self._process == 0:
            self.write(Evaluated(step, loss, rows, seconds))

    def saved(self, step: int, seconds: float, blocking_s: float, digest: str) -> None:
        """The checkpoint of `step` is complete on disk."""
        if self._process == 0:
            self.write(CheckpointSaved(step, seconds, blocking_s, digest))

    def refused(self, checkpointer: Checkpointer) -> None:
        """Put on record which checkpoints were found damaged."""
        for step, reason in checkpointer.refused():
            if self._process == 0:
                self.write(CheckpointRefused(step, reason[:1000]))

    def saves(self, checkpointer: Checkpointer, look: Callable[[], None]) -> None:
        """Put on record what `look`, its `check` or `wait`, finds complete or failed."""
        try:
            look()
        except SaveFailedError as error:
            self.write(CheckpointFailed(error.step, str(error)))
            raise
        finally:
            self.refused(checkpointer)
        for save in checkpointer.landed():
            self.saved(save.step, save.seconds, save.blocking_s, save.state_digest)
        for save in checkpointer.local.landed() if checkpointer.local else ():
            self.write(LocalSaved(save.step, save.seconds, save.blocking_s, save.state_digest))

    def once(self, event: Event) -> None:
        """What process 0 alone puts on record: plans of saves, samples of steps."""
        if self._process == 0:
            self.write(event)

    def finished(self, step: int, digest: str, meter: ThroughputMeter | None = None) -> None:
        """The run is complete."""
        total = attempt = None
        if meter is not None and meter.tokens:
            total, attempt = meter.state()["tokens"], meter.attempt_steps * meter.tokens
        self.write(Finished(step, digest, total, attempt))
        self.sync()

    def done(self) -> None:
        """This process has nothing left to do, and leaves with exit code 0."""
        self.heartbeat.beat("done")

    def sync(self) -> None:
        """Everything written so far is on disk: what a checkpoint stands for is on record."""
        for sink in self.sinks:
            sink.flush()
        if self._ledger is not None:
            self._ledger.sync()


def begin_together(recorder: Recorder, run_dir: str | os.PathLike[str]) -> None:
    """Open the ledger on every process, and process 0's TensorBoard files. Collective.

    The attempt is the leader's, else one more than the ledger has by process 0's count.
    """
    given = os.environ.get(SUPERVISED)
    attempt = int(given) if given else from_everyone(highest_attempt(Path(run_dir)))[0] + 1
    process, processes = jax.process_index(), jax.process_count()
    sinks = [TensorBoard(Path(run_dir, "tensorboard"))]
    together(lambda: recorder.begin(run_dir, process, processes, attempt, sinks))


def _timed(throughput: Throughput) -> dict[str, float | None]:
    """Fields of `StepCompleted`, in microseconds' precision."""
    parts = throughput.parts
    names = ("step_s", "data_s", "dispatch_s", "compute_s", "communication_s", "other_s")
    seconds = {name: round(getattr(parts, name), 6) for name in names}
    return {**seconds, "mfu": throughput.mfu, "hfu": throughput.hfu}


def digest_of(values: Any, step: int) -> Any:
    """Per-group values [G] as the ledger keeps them: all, or quantiles and the largest."""
    x = np.asarray(values, np.float64)
    if x.size <= WHOLE or step % WHOLE_EVERY == 0:
        return x.tolist()
    places = np.argsort(-np.where(np.isnan(x), np.inf, x), kind="stable")[:TOP]
    return {
        "quantiles": np.nanquantile(x, [0, 0.25, 0.5, 0.75, 1]).tolist(),
        "largest": x[places].tolist(),
        "groups": places.tolist(),
    }


def dump_on_request(run_dir: str | os.PathLike[str], heartbeat: Heartbeat) -> None:
    """SIGUSR1 writes all threads' stacks to the run's `stacks/`, also in a blocked process.

    Without a leader, who alone asks for them, nothing is changed.
    """
    if SUPERVISED not in os.environ:
        return
    attempt, rank = (os.environ.get(f"JAXREL_{x}", "0") for x in ("ATTEMPT", "PROCESS_ID"))
    path = Path(run_dir, "stacks", f"attempt-{attempt}-rank-{rank}.txt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")  # noqa: SIM115  it stays open for the life of the process
    except OSError as error:
        log.warning("stacks cannot be written to %s: %s", path, error)
        return
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    heartbeat.can_dump()


class Timer:
    """Seconds that a block took."""

    seconds = 0.0

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._began
