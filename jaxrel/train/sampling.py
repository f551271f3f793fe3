"""Now and then a step under the profiler: how much of the devices' time is communication."""

from collections.abc import Callable
from typing import Any

from jaxrel.events import Event, StepSampled
from jaxrel.throughput.profile_step import Sampler
from jaxrel.throughput.timer import StepTimer


class Sampling:
    """Samples every `every`-th step of a loop that keeps one step under way; 0 samples none.

    What a sample costs is told and is no part of any step. The loop waits for a sampled step
    before it starts the next one, and for no other.
    """

    def __init__(self, every: int, timer: StepTimer, tell: Callable[[Event], None]) -> None:
        self.every = every
        self._timer, self._tell = timer, tell
        self._sampler: Sampler | None = None
        self._step: int | None = None

    @property
    def under_way(self) -> bool:
        """Whether the newest step is being sampled."""
        return self._step is not None

    def compiled(self, step: Any) -> None:
        """The program of the steps to come, a `jax.stages.Compiled`."""
        if self.every:
            self._sampler = Sampler([step.as_text() or ""])

    def starts(self, step: int) -> None:
        """Step `step` is about to be dispatched."""
        if self._sampler is not None and step % self.every == 0:
            self._timer.turn_to("excluded")
            self._step = step if self._sampler.begin() else None

    def completed(self, step: int) -> None:
        """The loop has waited for step `step`, just now."""
        if self._sampler is None or self._step is None:
            return
        if step + 1 == self._step:
            self._sampler.mark()
        elif step >= self._step:
            self._timer.turn_to("excluded")
            self._end(self._sampler, self._step)
            self._timer.turn_to("other")

    def _end(self, sampler: Sampler, step: int) -> None:
        self._step = None
        split = sampler.end()
        if split is None:
            return
        if split.step_s > 0:
            share = split.exposed_communication_s / split.step_s
            self._timer.communication_share = share
        self._tell(
            StepSampled(
                step, split.step_s, split.compute_s, split.exposed_communication_s,
                split.overlapped_communication_s, split.callback_s, split.other_s, split.idle_s,
                split.slowest, split.source, round(sampler.cost_s, 6),
            )
        )  # fmt: skip
