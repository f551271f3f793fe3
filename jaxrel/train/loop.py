"""The training loop: place, step, look, save, stop, in one function.

`Trainer` composes parts that also work alone: a `TrainStep`, a feed of batches, a
`Checkpointer`. Whoever has a loop of their own takes those instead.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrel.checkpoint import Checkpointer
from jaxrel.checkpoint.host_random import capture, derive, restore
from jaxrel.data.pipeline import Feed, check_fingerprint, merge_states
from jaxrel.digest import state_digest
from jaxrel.exit_codes import DataRefusedError, DivergedError, PreemptedError
from jaxrel.train.everyone import from_everyone
from jaxrel.train.progress import ProgressLine
from jaxrel.train.state import TrainState
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

    def run(self) -> str:
        """Train to the last step and save it. Returns the final state digest.

        Raises PreemptedError when asked to stop (everything is saved), DivergedError when a
        loss or gradient is not finite (the update is kept out, nothing is saved), and what
        restoring and saving raise. A save in flight is joined on every way out.
        """
        with self.checkpointer, StopSignal() as stop, self.progress:
            state, done, digest = self._begin()
            ahead: StepRecord | None = None
            while done < self.steps:
                batch = self.step.layout.place(next(self.feed))
                state, record = self.step(state, batch)  # dispatched, not awaited
                if ahead is not None:
                    self._complete(done, ahead)  # so that one step is always under way
                ahead, done = record, done + 1
                self.checkpointer.check()
                stopping = stop.asked(done)
                if stopping or done % self.interval == 0 or done == self.steps:
                    self._complete(done, ahead)  # only a state known to be sound is saved
                    ahead, digest = None, state_digest(self.step.abstract_state, record.words)
                    self._save(done, state)
                if stopping and done < self.steps:
                    self.checkpointer.wait()
                    raise PreemptedError(
                        f"asked to stop: step {done} is saved; start again to go on"
                    )
            self.checkpointer.wait()
            return digest

    def _begin(self) -> tuple[TrainState, int, str]:
        """The state to go on from, its completed steps and digest; the feed stands there too."""
        latest = self.checkpointer.latest()
        if latest is None:
            derive(self.seed, jax.process_index(), 0)
            self.feed.start(0, None)
            return self.step.init(self.seed), 0, ""
        state, manifest = self.checkpointer.restore(self.step.abstract_state, latest)
        extra = manifest["extra"]
        check_facts(extra, self.facts)
        check_fingerprint(extra["fingerprint"], self.feed.fingerprint)
        self.feed.start(latest, extra["position"])
        how = restore(extra["host_random"], seed=self.seed, step=latest)
        note = "" if how == "restored" else "; host random states derived for this process count"
        self.progress.note(f"resumed from step {latest}{note}")
        return state, latest, manifest["state_digest"]

    def _complete(self, done: int, record: StepRecord) -> None:
        """Wait for a step, show it, and refuse to go on from one that was not finite."""
        if not bool(record.finite):
            losses = np.asarray(record.group_loss)
            bad = np.flatnonzero(~np.isfinite(losses)).tolist()
            where = f"; loss of groups {bad}" if bad else ""
            raise DivergedError(
                f"step {done}: loss {float(record.loss):g}, gradient norm"
                f" {float(record.grad_norm):g}{where}; the update was kept out"
            )
        self.progress.step(done, float(record.loss), float(record.grad_norm))

    def _save(self, done: int, state: TrainState) -> None:
        """Start the save of a complete step, with all that exact resumption needs."""
        assert int(state.step) == done, "the one counter: completed updates"
        extra = {
            **self.facts,
            "fingerprint": self.feed.fingerprint,
            "position": merge_states(from_everyone(self.feed.get_state())),
            "host_random": capture(),
        }
        self.checkpointer.save(done, state, extra=extra)


def check_facts(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint whose run had other facts (groups, reduction, ...)."""
    for name, value in now.items():
        if saved.get(name) != value:
            raise DataRefusedError(
                f"{name}: got {value}: the checkpoint was made with {saved.get(name)}, and it"
                " never changes in a run"
            )
