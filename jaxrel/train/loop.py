"""The training loop: place, step, look, save, stop, in one function.

`Trainer` composes parts that also work alone: a `TrainStep`, a feed of batches, a
`Checkpointer`. Whoever has a loop of their own takes those instead.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrel.checkpoint import Checkpointer, manifest
from jaxrel.checkpoint.host_random import capture, derive, restore
from jaxrel.checkpoint.together import together
from jaxrel.data.pipeline import Feed, check_fingerprint, merge_states
from jaxrel.digest import state_digest
from jaxrel.exit_codes import DataRefusedError, DivergedError, PreemptedError
from jaxrel.train.everyone import from_everyone
from jaxrel.train.progress import ProgressLine
from jaxrel.train.state import TrainState, overflowed
from jaxrel.train.step import StepRecord, TrainStep
from jaxrel.train.stop import StopSignal


@dataclass
class Trainer:
    """One run of `steps` updates, from wherever the newest checkpoint left it."""

    step: TrainStep
    feed: Feed
    checkpointer: Checkpointer
    progress: ProgressLine
    steps: int
    interval: int
    seed: int
    facts: dict[str, Any] = field(default_factory=dict)
    """What never changes in this run and is saved beside the state: JSON."""
    stop: StopSignal = field(default_factory=StopSignal)
    """What asks the run to stop early."""

    def run(self) -> str:
        """Train to the last step and save it. Returns the final state digest.

        Raises PreemptedError when asked to stop (everything is saved), DivergedError when a
        loss or gradient is not finite (the update is kept out, nothing is saved), and what
        restoring and saving raise. A save in flight is joined on every way out.
        """
        with self.checkpointer, self.stop, self.progress:
            state, done, digest, position = self._begin()
            saved, ahead = done, None
            while done < self.steps and not self.stop.asked(done):
                batch = self.stop.unless_asked(self.feed.__next__)
                if batch is None:
                    break
                position = self.feed.get_state()
                state, record = self.step(state, self.step.layout.place(batch))  # not awaited
                if ahead is not None:
                    self._complete(done, ahead)  # so that one step is always under way
                ahead, done = record, done + 1
                self.checkpointer.check()
                if done % self.interval == 0:
                    digest = self._save(done, state, ahead, position)
                    saved, ahead = done, None
            if ahead is not None:
                digest, saved = self._save(done, state, ahead, position), done
            self.checkpointer.wait()
            if done < self.steps:
                what = f"step {saved} is saved" if saved else "no step was complete"
                raise PreemptedError(f"asked to stop: {what}; start again to go on")
            return digest

    def check_resume(self) -> int | None:
        """The step that `run` goes on from, None in a new run. Changes nothing on disk.

        Raises DataRefusedError when the newest checkpoint is of a run with other facts or
        other data, or lacks what exact resumption needs.
        """
        step = self.checkpointer.latest()
        if step is not None:
            together(lambda: self._check(step))
        return step

    def _check(self, step: int) -> None:
        try:
            extra = manifest.read(self.checkpointer.directory / str(step))["extra"]
        except (OSError, manifest.NotOursError) as error:
            raise DataRefusedError(f"checkpoint of step {step} cannot be read: {error}") from error
        for name in ("fingerprint", "position", "host_random"):
            if not extra.get(name):
                raise DataRefusedError(f"checkpoint of step {step}: has no {name}: cannot go on")
        check_facts(extra, self.facts)
        check_fingerprint(extra["fingerprint"], self.feed.fingerprint)

    def _begin(self) -> tuple[TrainState, int, str, dict[str, Any]]:
        """The state to go on from, its completed steps, digest and data position."""
        latest = self.check_resume()
        if latest is None:
            derive(self.seed, jax.process_index(), 0)
            self.feed.start(0, None)
            return self.step.init(self.seed), 0, "", {}
        state, found = self.checkpointer.restore(self.step.abstract_state, latest)
        extra = found["extra"]
        self.feed.start(latest, extra["position"])
        how = restore(extra["host_random"], seed=self.seed, step=latest)
        note = "" if how == "restored" else "; host random states derived for this process count"
        self.progress.note(f"resumed from step {latest}{note}")
        return state, latest, found["state_digest"], extra["position"]

    def _complete(self, done: int, record: StepRecord) -> None:
        """Wait for a step, show it, and refuse to go on from what is not finite."""
        if not bool(record.finite):
            losses = np.asarray(record.group_loss)
            bad = np.flatnonzero(~np.isfinite(losses)).tolist()
            where = f"; loss of groups {bad}" if bad else ""
            raise DivergedError(
                f"step {done}: loss {float(record.loss):g}, gradient norm"
                f" {float(record.grad_norm):g}{where}; the update was kept out"
            )
        if bad := overflowed(self.step.abstract_state, record.not_finite):
            name, count = next(iter(bad.items()))
            more = f" and {len(bad) - 1} more leaves" if len(bad) > 1 else ""
            raise DivergedError(
                f"step {done}: loss {float(record.loss):g}, gradient norm"
                f" {float(record.grad_norm):g}; the update overflowed: {count} elements of {name}"
                f"{more} are not finite; this state is not saved"
            )
        self.progress.step(done, float(record.loss), float(record.grad_norm))

    def _save(self, done: int, state: TrainState, record: StepRecord, position: Any) -> str:
        """Start the save of a complete step, with all that exact resumption needs.

        Returns the digest of the state.
        """
        self._complete(done, record)  # only a state known to be sound is saved
        assert int(state.step) == done, "the one counter: completed updates"
        extra = {
            **self.facts,
            "fingerprint": self.feed.fingerprint,
            "position": merge_states(from_everyone(position)),
            "host_random": capture(),
        }
        self.checkpointer.save(done, state, extra=extra, words=record.words)
        return state_digest(self.step.abstract_state, record.words)


def check_facts(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint whose run had other facts (groups, reduction, ...)."""
    for name, value in now.items():
        if saved.get(name) != value:
            raise DataRefusedError(
                f"{name}: got {value}: the checkpoint was made with {saved.get(name)}, and it"
                " never changes in a run"
            )
