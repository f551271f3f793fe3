"""TensorBoard files, written from a run's events, one value a tag and step.

An attempt that resumes from step s first tells TensorBoard to forget what an earlier one
wrote beyond s. And nothing up to s is missing: `flush` is called before every save, so what
a checkpoint stands for is in the files.

Everything is written at once by the calling thread. (tensorboardX's own writer hands over to
a thread through a queue: when that thread dies of a full disk, the training loop blocks.)
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from jaxrel.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Event,
    PhaseBegan,
    Resumed,
    StepCompleted,
)

log = logging.getLogger(__name__)

_Line: Any = getattr(event_pb2, "Event")  # noqa: B009  made at run time, unknown to type checkers
_Log: Any = getattr(event_pb2, "SessionLog")  # noqa: B009

_BINS = 30
"""Of a histogram; a number that follows the data grows without bound when one group is far out."""


class TensorBoard:
    """The files of one attempt, in `directory`; for rank 0.

    A failure to write never stops the run: it is counted in `lost` and told once.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.fspath(directory)
        self.lost = 0
        """Events that could not be shown."""
        self.error = ""
        """Why, the last time."""
        self._writer: Any = None
        self._last_s: float | None = None

    def write(self, event: Event) -> None:
        """Show an event; most kinds have nothing to show."""
        if isinstance(event, Resumed):
            self._last_s = None
            self._open(event.step + 1)
        elif isinstance(event, PhaseBegan) and event.phase == "train":
            self._last_s = time.monotonic()  # what an evaluation or a save took is no step's
        elif isinstance(event, StepCompleted):
            now, before = time.monotonic(), self._last_s
            self._last_s = now
            stalled = event.data_s + event.checkpoint_s + event.evaluation_s + event.checks_s
            took = None if before is None else now - before
            self._add(event.step, _of_step(event, took, stalled))
        elif isinstance(event, Evaluated):
            self._add(event.step, _scalars({"held_out/loss": event.loss}))
        elif isinstance(event, CheckpointSaved):
            values = {"seconds": event.seconds, "blocking_s": event.blocking_s, "success": 1.0}
            self._add(event.step, _scalars({f"checkpoint/{k}": v for k, v in values.items()}))
        elif isinstance(event, CheckpointFailed):
            self._add(event.step, _scalars({"checkpoint/success": 0.0}))

    def flush(self) -> None:
        """Hand everything to the operating system."""
        if self._writer is not None:
            self._try(self._writer.flush, 0)

    def close(self) -> None:
        """Flush, and close the files."""
        if self._writer is not None:
            self._try(self._writer.close, 0)
            self._writer = None

    def _open(self, purge_step: int) -> None:
        def begin() -> None:
            os.makedirs(self.directory, exist_ok=True)
            # TensorBoard reads files in the order of their names, and clocks step back.
            number = len(os.listdir(self.directory))
            self._writer = EventsWriter(os.path.join(self.directory, f"events-{number:06d}"))
            start = _Log(status=_Log.START)
            mark = _Line(step=purge_step, session_log=start)
            mark.wall_time = time.time()
            self._writer.write_event(mark)

        self._try(begin, 1)

    def _add(self, step: int, values: Iterator[Any]) -> None:
        def write() -> None:
            for value in values:
                line = _Line(step=step, summary=value)
                line.wall_time = time.time()
                self._writer.write_event(line)

        if self._writer is None:
            self.lost += 1
        else:
            self._try(write, 1)

    def _try(self, act: Callable[[], None], events: int) -> None:
        try:
            act()
        except Exception as error:  # whatever it is, the run is worth more
            if not self.error:
                log.warning("TensorBoard files in %s: %s; training goes on", self.directory, error)
            self.lost, self.error = self.lost + events, f"{type(error).__name__}: {error}"


def _of_step(event: StepCompleted, took: float | None, stalled: float) -> Iterator[Any]:
    step_s = event.step_s  # measured by the loop itself, where it has a meter
    waited = took if step_s is None else step_s
    tokens = None if event.tokens is None or not waited else event.tokens / waited
    if step_s is None and took is not None:
        step_s = max(0.0, took - stalled)
    yield from _scalars(
        {
            "train/loss": event.loss,
            "train/grad_norm": event.grad_norm,
            "train/learning_rate": event.learning_rate,
            "throughput/tokens_per_second": tokens,
            # Without what held the loop up: evaluation and saves are no part of a step.
            "throughput/step_s": step_s,
            "throughput/mfu": event.mfu,
            "throughput/hfu": event.hfu,
        }
    )
    for name in ("loss", "grad_norm"):
        values = event.groups.get(name)
        if isinstance(values, list):  # not quantiles
            yield summary.histogram(f"groups/{name}", [x for x in values if x is not None], _BINS)


def _scalars(values: dict[str, float | None]) -> Iterator[Any]:
    for tag, value in values.items():
        if value is not None:
            yield summary.scalar(tag, value)
