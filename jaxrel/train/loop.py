"""The training loop: place, step, look, evaluate, save, stop, in one function.

`Trainer` composes parts that also work alone: a `TrainStep`, a feed of batches, a
`Checkpointer`. Whoever has a loop of their own takes those instead.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from jaxrel.checkpoint.checkpointer import Checkpointer
from jaxrel.checkpoint.errors import SaveFailedError
from jaxrel.checkpoint.host_random import capture, derive, restore
from jaxrel.checkpoint.together import from_everyone, together
from jaxrel.data.pipeline import Feed, check_fingerprint, merge_states
from jaxrel.events import Phase
from jaxrel.exit_codes import DataRefusedError, DivergedError, PreemptedError
from jaxrel.plan.auto_interval import LOCAL_SHARE
from jaxrel.plan.peaks import Peak
from jaxrel.throughput.meter import ThroughputMeter
from jaxrel.throughput.step_flops import counted_beside
from jaxrel.throughput.timer import Part
from jaxrel.train.again import Again
from jaxrel.train.cadence import Cadence, Interval
from jaxrel.train.evaluation import Evaluation
from jaxrel.train.progress import ProgressLine
from jaxrel.train.recorder import SUPERVISED, Recorder, Timer
from jaxrel.train.sampling import Sampling
from jaxrel.train.state import TrainState, overflowed
from jaxrel.train.step import StepRecord, TrainStep
from jaxrel.train.stop import StopSignal


def _no_meter() -> ThroughputMeter:
    return ThroughputMeter(None, 1, Peak(None, "unknown"))


@dataclass
class Trainer:
    """One run of `steps` updates, from wherever the newest checkpoint left it."""

    step: TrainStep
    feed: Feed
    checkpointer: Checkpointer
    progress: ProgressLine
    steps: int
    interval: Interval
    seed: int
    facts: dict[str, Any] = field(default_factory=dict)
    """What never changes in this run and is saved beside the state: JSON."""
    about: dict[str, Any] = field(default_factory=dict)
    """What is saved as well and may change: JSON."""
    local_interval: Interval = "auto"
    """Steps between local saves, where the checkpointer has a local tier."""
    cast: Sequence[str] = ()
    partial: Sequence[str] = ()
    """Leaves that may differ from the checkpoint's, as in `Checkpointer.restore`."""
    stop: StopSignal = field(default_factory=StopSignal)
    """What asks the run to stop early."""
    recorder: Recorder = field(default_factory=Recorder)
    """Whom this process tells what it does; by default nobody."""
    evaluation: Evaluation | None = None
    """The held-out loss at a cadence."""
    tokens: int | None = None
    """Tokens that one step trains on."""
    history: tuple[int, float] = (0, 0.0)
    """Failures of the run before this start and the job time in which they came, for `auto`."""
    learning_rates: np.ndarray | None = None
    """The rate that each update is made with, float32 [steps]."""
    meter: ThroughputMeter = field(default_factory=_no_meter)
    """What measures the steps; by default without tokens and peak."""
    sample_every: int = 0
    """Of so many steps one is profiled; 0 profiles none."""
    _sampling: Sampling = field(init=False)
    _cadence: Cadence = field(init=False)
    _local_cadence: Cadence | None = None
    _again: Again = field(default_factory=Again)

    def run(self) -> str:
        """Train to the last step and save it. Returns the final state digest.

        Raises PreemptedError when asked to stop (everything is saved), DivergedError when a
        loss or gradient is not finite (the update is kept out, nothing is saved), and what
        restoring and saving raise. A save in flight is joined on every way out.
        """
        with self.checkpointer, self.stop, self.progress:
            state, done, digest, position = self._begin()
            saved = done if self.checkpointer.is_durable(done) else 0
            ahead, step, record = None, None, None
            self._plan_saves(done)
            self._sampling = Sampling(self.sample_every, self.meter.timer, self.recorder.once)
            while done < self.steps and not self.stop.asked(done):
                batch = self._next_batch(done, ahead)
                if batch is None:
                    break
                position = self.feed.get_state()
                placed = self.step.layout.place(batch)
                step = step or self._compile(placed, done)
                self._sampling.starts(done + 1)
                self._turn_to("dispatch", done, ahead)
                state, record = step(state, placed)  # not awaited
                if ahead is not None:
                    self._complete(done, ahead)  # so that one step is always under way
                ahead, done = record, done + 1
                self._look(self.checkpointer.check)
                evaluate = self._evaluates(done)
                save = self._cadence.due(done) or self._again.left_s == 0
                local = not save and self._local_cadence and self._local_cadence.due(done)
                # Saved and evaluated are states that are known to be sound. While a sample is
                # read no step is under way: it would seem to take no time.
                if evaluate or save or local or self._sampling.under_way:
                    self._complete(done, ahead)
                    ahead = None
                metric = self._evaluate(done, state) if evaluate else None
                if save:
                    digest, saved = self._save(done, state, record, position, metric), done
                elif local:
                    self._save_locally(done, state, record, position)
            if ahead is not None:
                self._complete(done, ahead)
            if done > saved:
                digest, saved = self._save(done, state, record, position), done
            self._phase("checkpoint", done)
            self._look(self.checkpointer.wait)
            while (pause := self._again.left_s) is not None:
                time.sleep(pause)
                digest, saved = self._save(done, state, record, position), done
                self._look(self.checkpointer.wait)
            if done < self.steps:
                self._phase("stop", done)
                what = f"step {saved} is saved" if saved else "no step was complete"
                raise PreemptedError(f"asked to stop: {what}; start again to go on")
            self.recorder.saves(self.checkpointer, lambda: together(self.checkpointer.settle))
            self._phase("stop", done)
            self.recorder.finished(done, digest, self.meter)
            return digest

    def check_resume(self) -> int | None:
        """The step that `run` goes on from, None in a new run. Writes nothing but marks of damage.

        Raises DataRefusedError when the newest checkpoint is of a run with other facts or
        other data, or lacks what exact resumption needs.
        """
        try:
            step = self.checkpointer.latest(proven_from=self.steps)
        finally:
            self.recorder.refused(self.checkpointer)
        if step is not None:
            together(lambda: self._check(step, self.checkpointer.manifest(step)["extra"]))
            if not self.partial:
                self.checkpointer.compare(self.step.abstract_state, step, cast=self.cast)
        return step

    def _check(self, step: int, extra: dict[str, Any]) -> None:
        for name in ("fingerprint", "position", "host_random"):
            if not extra.get(name):
                raise DataRefusedError(f"checkpoint of step {step}: has no {name}: cannot go on")
        check_facts(extra, self.facts)
        check_fingerprint(extra["fingerprint"], self.feed.fingerprint)

    def _begin(self) -> tuple[TrainState, int, str, dict[str, Any]]:
        """The state to go on from, its completed steps, digest and data position."""
        self.recorder.phase("restore")
        latest, degrees = self.checkpointer.latest(), dict(self.step.layout.mesh.shape)
        if latest is None:
            if os.environ.get(SUPERVISED, "1") != "1":
                self.progress.note("no checkpoint yet: from step 0")
            derive(self.seed, jax.process_index(), 0)
            self.feed.start(0, None)
            state, digest, position = self.step.init(self.seed), "", {}
        else:
            state, found = self._restore()
            latest, extra, digest = found["step"], found["extra"], found["state_digest"]
            together(lambda: self._check(found["step"], extra))
            position = extra["position"]
            self.feed.start(latest, position)
            self.meter.restore(extra.get("meter") or {"steps": latest, "tokens": 0})
            how = restore(extra["host_random"], seed=self.seed, step=latest)
            note = (
                "" if how == "restored" else "; host random states derived for this process count"
            )
            self.progress.note(f"resumed from step {latest}{note}")
        self.recorder.resumed(latest or 0, degrees, digest or None)
        return state, latest or 0, digest, position

    def _plan_saves(self, done: int) -> None:
        """When to save from `done` on: with two tiers each is there for its own failures."""
        two, tell = self.checkpointer.local is not None, self.recorder.once
        share = 1 - LOCAL_SHARE if two else 1.0
        self._cadence = Cadence(self.interval, done, *self.history, share=share, tell=tell)
        if two:
            self._local_cadence = Cadence(
                self.local_interval,
                done,
                *self.history,
                share=LOCAL_SHARE,
                tier="local",
                tell=tell,
            )

    def _restore(self) -> tuple[TrainState, dict[str, Any]]:
        """The newest good checkpoint; what was found damaged on the way is put on record."""
        template: Any = self.step.abstract_state
        if self.partial:  # leaves that the checkpoint lacks begin as in a new run
            template = self.step.init(self.seed)
        try:
            return self.checkpointer.restore(template, cast=self.cast, partial=self.partial)
        finally:
            self.recorder.refused(self.checkpointer)

    def _next_batch(self, done: int, ahead: StepRecord | None) -> Any:
        """The next batch, None when asked to stop."""
        self._turn_to("data", done, ahead)
        return self.stop.unless_asked(self.feed.__next__)

    def _turn_to(self, part: Literal["data", "dispatch"], done: int, ahead: Any) -> None:
        """Say what the loop is at now; the devices may still be at work on the step `ahead`."""
        place = "data" if part == "data" else "step"
        self.recorder.at(place, done - (ahead is not None), done)
        self.meter.timer.turn_to(part, busy=ahead is not None and not _is_ready(ahead.loss))

    def _phase(self, phase: Phase, done: int) -> None:
        """The same, for what is no part of a step."""
        self.recorder.phase(phase, done)
        known: dict[str, Part] = {"checkpoint": "checkpoint", "train": "other"}
        self.meter.timer.turn_to(known.get(phase, "excluded"))

    def _compile(self, placed: Any, done: int) -> TrainStep:
        self._phase("compile", done)
        self.progress.note("compiling")
        known = self.meter.peak.flops is not None  # else FLOPs would be of no use
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), placed)
        state = self.step.abstract_state
        counted = counted_beside(self.step.jitted, state, like) if known else None
        step = self.step.compiled(placed)
        if counted is not None:
            self.meter.flops = counted(step.jitted)
        self._sampling.compiled(step.jitted)
        self._phase("train", done)
        self.meter.timer.completed()  # what came before is no step's
        if self.meter.peak.flops is None:
            told = f"MFU is {self.meter.peak.source}"
            self.progress.note(f"{told}; give throughput.peak_flops a number, or measured")
        return step

    def _complete(self, done: int, record: StepRecord) -> None:
        """Wait for a step, tell it, and refuse to go on from what is not finite."""
        self.recorder.at("wait", done - 1, done)
        self.meter.timer.turn_to("compute", busy=not _is_ready(record.loss))
        record = jax.device_get(record)  # waits; all of it in one go
        throughput = self.meter.completed()
        self._sampling.completed(done)
        refuse_what_is_not_finite(done, record, self.step.abstract_state)
        loss, norm = float(record.loss), float(record.grad_norm)
        rate = None if self.learning_rates is None else float(self.learning_rates[done - 1])
        groups = {"loss": record.group_loss, "grad_norm": record.group_grad_norm}
        self.recorder.metered(self.meter)
        self.recorder.step(
            done,
            loss,
            norm,
            learning_rate=rate,
            tokens=self.tokens,
            groups=groups,
            throughput=throughput,
        )
        self.progress.step(done, loss, norm, throughput.mfu)
        self.checkpointer.healthy(done)
        self._cadence.completed()
        if self._local_cadence:
            self._local_cadence.completed()

    def _evaluates(self, done: int) -> bool:
        return self.evaluation is not None and (
            done % self.evaluation.every == 0 or done == self.steps
        )

    def _evaluate(self, done: int, state: TrainState) -> float:
        """Before the save of the same step, so that what is saved was evaluated, once."""
        assert self.evaluation is not None
        self._phase("evaluation", done)
        with Timer() as took:
            loss, rows = self.evaluation.loss(self.step, state.params)
        self.recorder.evaluated(done, loss, rows, took.seconds)
        self._phase("train", done)
        self.progress.note(f"step {done}: held-out loss {loss:.4f} over {rows} rows")
        return loss

    def _save(
        self,
        done: int,
        state: TrainState,
        record: StepRecord | None,
        position: Any,
        metric: float | None = None,
    ) -> str:
        """Start the save of a complete step, with all that exact resumption needs.

        Returns the digest of the state, "" where the save could not begin and will be made again.
        """
        self._phase("checkpoint", done)
        self.recorder.sync()
        extra = self._extra(done, state, position)
        self._look(self.checkpointer.wait)
        self._again.begun()
        digest = ""

        def begin() -> None:
            nonlocal digest
            words = None if record is None else record.words
            digest = self.checkpointer.save(done, state, extra=extra, words=words, metric=metric)

        self._look(begin)
        self._cadence.saved(done, self.checkpointer.newest_landed)
        self._phase("train", done)
        return digest

    def _look(self, look: Callable[[], None]) -> None:
        """Take note of what became of a save, and bear a failure that may pass.

        Not in a job of several processes: the others learn of it at the deadline alone, so there
        the attempt ends and the next one goes on from the checkpoint before.
        """
        newest = self.checkpointer.newest_landed
        try:
            self.recorder.saves(self.checkpointer, look)
        except SaveFailedError as error:
            pause = self._again.failed(error) if jax.process_count() == 1 else None
            if pause is None:
                raise
            self.progress.note(f"{error}; saving again in {pause:g} s")
        if self.checkpointer.newest_landed is not newest:
            self._again.landed()

    def _save_locally(
        self, done: int, state: TrainState, record: StepRecord, position: Any
    ) -> None:
        """The same for the local tier, where a failure changes nothing."""
        self._phase("checkpoint", done)
        self.recorder.sync()
        local, extra = self.checkpointer.local, self._extra(done, state, position)
        assert local is not None and self._local_cadence is not None
        self.checkpointer.save_local(done, state, extra=extra, words=record.words)
        self._local_cadence.saved(done, local.newest)
        self._phase("train", done)

    def _extra(self, done: int, state: TrainState, position: Any) -> dict[str, Any]:
        """What belongs to the state besides its arrays."""
        assert int(state.step) == done, "the one counter: completed updates"
        return {
            **self.about,
            **self.facts,
            "fingerprint": self.feed.fingerprint,
            "position": merge_states(from_everyone(position)),
            "host_random": capture(),
            "meter": self.meter.state(),
        }


def _is_ready(x: Any) -> bool:
    return x.is_ready()


def refuse_what_is_not_finite(done: int, record: StepRecord, abstract: TrainState) -> None:
    """Raise DivergedError when a step, or the state it made, is not finite."""
    leaves = overflowed(abstract, record.not_finite)
    if record.finite and not leaves:
        return
    what = f"step {done}: loss {float(record.loss):g}, gradient norm {float(record.grad_norm):g}"
    if not record.finite:
        bad = np.flatnonzero(~np.isfinite(np.asarray(record.group_loss))).tolist()
        where = f"; loss of groups {bad}" if bad else ""
        raise DivergedError(f"{what}{where}; the update was kept out")
    name, count = next(iter(leaves.items()))
    more = f" and {len(leaves) - 1} more leaves" if len(leaves) > 1 else ""
    raise DivergedError(
        f"{what}; the update overflowed: {count} elements of {name}{more} are not finite;"
        " this state is not saved"
    )


def check_facts(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint whose run had other facts (groups, reduction, ...)."""
    for name, value in now.items():
        if saved.get(name) != value:
            raise DataRefusedError(
                f"{name}: got {value}: the checkpoint was made with {saved.get(name)}, and it"
                " never changes in a run"
            )
