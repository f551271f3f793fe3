"""Where the time of a run went, from its records alone.

The definition, which published numbers rest on:

*Wall time* runs from the first record of the leader or of rank 0 to the last. Every
microsecond of it is either *effective* or in exactly one other category (`BADPUT`). Records of
other ranks move no time. *Effective training time* is effective time over wall time.

1. Time belongs to what the run was at: the phase that rank 0 last began (`start`, `join`,
   `restore`, `compile`, `evaluation`, `checks`, `checkpoint`, `stop`).
2. In phase `train`, the time up to a completed step is split: what the step says it spent on
   data, checkpoint, evaluation and checks, in this order and never more than there is, goes
   there; the rest is the step's own. It is effective if the state at the end rests on that
   step: no later resumption (of this or a later attempt) was from an earlier step, the step is
   beyond the one its own attempt resumed from, and its number was not complete there before.
   Else it is `rework`: done in vain or done again. A step of a process that never said what it
   resumed from is `unknown`.
3. Training that no completed step closes is `rework` when a failure, a resumption or another
   attempt follows; when the run stops in order, the evaluation and the save of its last step
   go where they belong and the rest to `stop`; else it is `unknown`.
4. A failure ends its attempt at the time it happened, known from `after_s` and never before
   the event before it. From there to its detection is `detection`, then `stop` until every
   process is proven dead, then `restart_wait` until the next attempt is started, then `start`.
5. After the end of a job, after the last record of an attempt that nobody supervises, and
   after the last record of a leader that vanished, until the next job or attempt: `idle`.
6. The current attempt is the highest number seen so far. Records of older ones move no time
   and their steps are not effective; neither are those of an attempt after its failure.
   What an attempt does before it names a phase is `start`, or `unknown` if its first record is
   missing.

So an hour of which nothing is known is never effective, and one more failure never makes a
number better.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, get_args

from jaxrel.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    Evaluated,
    FailureDetected,
    Finished,
    GangDead,
    JobEnded,
    JobStarted,
    Phase,
    PhaseBegan,
    Record,
    Resumed,
    StepCompleted,
    WorkerFailed,
    WorkerStarted,
)
from jaxrel.ledger.lineage import LEADER, RANK0, Lineage

EFFECTIVE = "effective"
BADPUT = (
    "start", "join", "compile", "restore", "rework", "checkpoint", "data", "evaluation", "checks",
    "triage", "detection", "stop", "restart_wait", "idle", "unknown",
)  # fmt: skip
"""Every category but `effective`."""

DEFINITION = (
    "effective_training_time = effective_s / wall_s: the time in steps that the state at the end"
    " rests on (without waiting for data, saving, evaluating and checking), over the time from"
    " the run's first record to its last, downtime included"
)


class Span(NamedTuple):
    """A stretch of time in one category."""

    start_us: int
    end_us: int
    category: str
    attempt: int


@dataclass(frozen=True)
class Accounting:
    """Where the time of a run went, in microseconds."""

    start_us: int
    """Since the epoch."""
    wall_us: int
    effective_us: int
    badput_us: dict[str, int]
    """By category, all of `BADPUT`; with `effective_us` they sum to `wall_us`."""
    spans: list[Span]
    """All of the wall time, in order."""


def account(records: Iterable[Record], now_us: int | None = None) -> Accounting:
    """Account for every microsecond from the first record to the last, or to `now_us`.

    `records` are by time, as `reader.read` gives them; in any other order, time that would run
    backwards does not pass.
    """
    records = list(records)
    sweep = _Sweep(records)
    for place, record in enumerate(records):
        if record.source in (LEADER, RANK0):
            sweep.see(place, record)
    spans = _merged(sweep.close(now_us))
    totals: dict[str, int] = dict.fromkeys((EFFECTIVE, *BADPUT), 0)
    for span in spans:
        totals[span.category] += span.end_us - span.start_us
    effective = totals.pop(EFFECTIVE)
    return Accounting(sweep.start, sweep.now - sweep.start, effective, totals, spans)


class _Sweep:
    """What the run is at, as its records are seen one by one.

    `state` is the category of the time from `now` on. In `train` that is not known before a
    step is complete: until then the time is `pending`.
    """

    def __init__(self, records: list[Record]) -> None:
        self.lineage = Lineage(records)
        self.led = {record.attempt for record in records if record.source == LEADER}
        self.spans: list[Span] = []
        self.pending: list[tuple[int, int]] = []
        self.steps: list[tuple[int, Record, int, int]] = []
        """Place and record of each step that may be effective, and its range of `spans`."""
        self.start = self.now = self.end = 0
        self.attempt: int | None = None
        self.state = "unknown"
        self.over = False
        """The attempt has failed or ended: its processes' records move nothing any more."""
        self.last = 0
        """Time of the attempt's last record."""
        self.job_at: int | None = None
        """When a new leader began, if the attempt has been silent since."""
        self.resumed: int | None = None
        """The step that the attempt resumed from; None before it says so."""
        self.done: set[int] = set()
        """Steps completed since."""
        self._reset_tail(None)

    def see(self, place: int, record: Record) -> None:
        """One more record of the leader or of rank 0."""
        event, attempt, time = record.event, record.attempt, record.time_us
        job = record.source == LEADER and isinstance(event, JobStarted | JobEnded)
        if self.attempt is None:
            self.start = self.now = self.end = time
        self.end = max(self.end, time)
        if self.attempt is None or attempt > self.attempt:
            self._begin_attempt(record)
            if isinstance(event, JobStarted):
                return
        elif attempt < self.attempt and not (job and attempt == 0):
            return
        if attempt == self.attempt and not isinstance(event, JobStarted):
            self.last, self.job_at = max(self.last, time), None
        if record.source == LEADER:
            self._leader(record)
        elif not self.over:
            self._worker(place, record)

    def close(self, now_us: int | None) -> list[Span]:
        """The spans up to the last record or `now_us`, each in its category."""
        if self.attempt is None:
            return []
        end = self.end if now_us is None else max(self.end, now_us)
        left = self.state == "stop" and self.attempt not in self.led  # and nobody tells when
        if self.job_at is not None or left:
            self._fall_silent(end, "unknown")
        self._advance(end)
        self._settle("unknown")
        for place, record, first, last in self.steps:
            assert isinstance(record.event, StepCompleted)
            kept = self.lineage.keeps(place, record.attempt, record.event.step)
            for i in range(first, last):
                self.spans[i] = self.spans[i]._replace(category=EFFECTIVE if kept else "rework")
        return self.spans

    def _begin_attempt(self, record: Record) -> None:
        event, time = record.event, record.time_us
        anew = self.job_at is not None or isinstance(event, JobStarted)
        if self.attempt is not None and (anew or not {self.attempt, record.attempt} <= self.led):
            self._fall_silent(time, "rework")
        self._advance(time)
        self._settle("rework")
        first = isinstance(event, JobStarted | AttemptStarted | WorkerStarted)
        self.state = "start" if first else "unknown"
        self.attempt, self.over, self.last, self.job_at = record.attempt, False, time, None
        self._branch(None)

    def _fall_silent(self, time: int, pending: str) -> None:
        """Nobody was there from the last record on, up to `time` or to a new leader."""
        self._advance(self.last)
        self._settle(pending)
        self.state = "idle"
        if self.job_at is not None:
            self._advance(min(self.job_at, time))
            self.state = "start"
        self._advance(time)

    def _leader(self, record: Record) -> None:
        event, time = record.event, record.time_us
        match event:
            case JobStarted() if self.state == "idle":
                self._move(time, "idle", "start")
            case JobStarted() if self.job_at is None:  # its attempt may still be going on
                self.job_at = time
            case JobEnded():
                self._move(time, "unknown", "idle")
                self.over = True
            case FailureDetected() if not self.over:
                happened = time - _microseconds(event.after_s, max(0, time - self.now))
                self._move(happened, "rework", "detection")
                self._move(time, "detection", "stop")
                self.over = True
            case GangDead() if self.state != "idle":
                self._move(time, "rework", "restart_wait")
                self.over = True
            case AttemptEnded() if self.state != "idle":
                well = event.exit == 0
                self._move(
                    time, "unknown" if well else "rework", "stop" if well else "restart_wait"
                )
                self.over = True

    def _worker(self, place: int, record: Record) -> None:
        event, time = record.event, record.time_us
        match event:
            case StepCompleted() if self.state == "train":
                self._advance(time)
                self._complete(place, record, event)
            case Evaluated() if event.step == self.tail_step:
                self.tail_evaluation += event.seconds
            case CheckpointSaved() if event.step == self.tail_step:
                self.tail_checkpoint += event.blocking_s
            case PhaseBegan(phase="stop") | Finished():
                self._advance(time)
                self._split(0.0, self.tail_checkpoint, self.tail_evaluation, 0.0)
                self._move(time, "stop", "stop")
            case PhaseBegan():  # training goes on after it, unless a resumption says otherwise
                self._advance(time)
                self.state = event.phase if event.phase in get_args(Phase) else "unknown"
            case WorkerStarted():
                self._move(time, "rework", "start")
                self._branch(None)
            case Resumed():
                self._move(time, "rework", self.state)
                self._branch(event.step)
            case WorkerFailed():
                self._move(time, "rework", "stop")

    def _branch(self, step: int | None) -> None:
        self.resumed, self.done = step, set()
        self._reset_tail(step)

    def _reset_tail(self, step: int | None) -> None:
        """What follows the last completed step: its evaluation and its save, in seconds."""
        self.tail_step, self.tail_evaluation, self.tail_checkpoint = step, 0.0, 0.0

    def _complete(self, place: int, record: Record, event: StepCompleted) -> None:
        self._split(event.data_s, event.checkpoint_s, event.evaluation_s, event.checks_s)
        if self.resumed is None:
            self._settle("unknown")
        elif event.step <= self.resumed or event.step in self.done:
            self._settle("rework")
        else:
            first = len(self.spans)
            self._settle("unknown")  # until all resumptions have been seen
            self.steps.append((place, record, first, len(self.spans)))
            self.done.add(event.step)
        self._reset_tail(event.step)

    def _split(self, data: float, checkpoint: float, evaluation: float, checks: float) -> None:
        """Take these seconds off the front of what is pending."""
        parts = ("data", data), ("checkpoint", checkpoint), ("evaluation", evaluation)
        for category, seconds in (*parts, ("checks", checks)):
            if seconds:
                left = sum(end - start for start, end in self.pending)
                self._take(_microseconds(seconds, left), category)

    def _take(self, amount: int, category: str) -> None:
        while amount > 0:
            start, end = self.pending.pop(0)
            cut = min(end, start + amount)
            self._add(start, cut, category)
            if cut < end:
                self.pending.insert(0, (cut, end))
            amount -= cut - start

    def _move(self, time: int, pending: str, state: str) -> None:
        """At `time` the run is at something else, and what is pending goes to a category."""
        self._advance(time)
        self._settle(pending)
        self.state = state

    def _settle(self, category: str) -> None:
        for start, end in self.pending:
            self._add(start, end, category)
        self.pending = []

    def _advance(self, time: int) -> None:
        if time > self.now:
            if self.state == "train":
                self.pending.append((self.now, time))
            else:
                self._add(self.now, time, self.state)
            self.now = time

    def _add(self, start: int, end: int, category: str) -> None:
        self.spans.append(Span(start, end, category, self.attempt or 0))


def _microseconds(seconds: float | None, most: int) -> int:
    """As whole microseconds from 0 to `most`; what is no duration is 0."""
    if seconds is None or not seconds > 0:  # nor NaN
        return 0
    return most if seconds * 1e6 >= most else round(seconds * 1e6)


def _merged(spans: list[Span]) -> list[Span]:
    """By time, with neighbours of one kind made one."""
    merged: list[Span] = []
    for span in sorted(spans):
        before = merged[-1] if merged else None
        if before and (before.end_us, *before[2:]) == (span.start_us, *span[2:]):
            merged[-1] = before._replace(end_us=span.end_us)
        else:
            merged.append(span)
    return merged
