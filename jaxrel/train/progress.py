"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_WINDOW = 20
"""Steps over which the rate is measured."""


class _Console(Console):
    """A console whose reader may go away: rich would leave the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class ProgressLine:
    """Shows completed steps; a failure to print never stops a run.

    Args:
        total: Steps of the whole run.
        tokens_per_step: Tokens that one step trains on; 0 when they are not known.
        every: Steps between plain lines.
        console: Where to print; standard error by default.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        total: int,
        tokens_per_step: int,
        every: int = 10,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.tokens, self.every, self.clock = total, tokens_per_step, every, clock
        self.console = console or _Console(stderr=True, highlight=False, soft_wrap=True)
        self._times: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        columns = TextColumn("step {task.completed}/{task.total}"), BarColumn()
        text = TextColumn("{task.fields[text]}")  # of the three only the bar may shrink
        bar = Progress(*columns, text, console=self.console, disable=not self.console.is_terminal)
        self._bar, self._task = bar, bar.add_task("", total=total, text="")

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError):
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._bar.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        with contextlib.suppress(OSError):  # a full disk is no reason to stop training
            self.console.print(text, markup=False)

    def step(self, done: int, loss: float, grad_norm: float, mfu: float | None = None) -> None:
        """Step `done` is complete."""
        self._times.append((done, self.clock()))
        share = "" if mfu is None else f"  MFU {mfu:.1%}"
        text = f"loss {loss:.4f}  grad norm {grad_norm:.3f}{self._rate(done, share)}"
        if self.console.is_terminal:
            with contextlib.suppress(OSError):
                self._bar.update(self._task, completed=done, text=text)
        elif done % self.every == 0 or done == self.total or len(self._times) == 1:
            self.note(f"step {done}/{self.total}  {text}")

    def _rate(self, done: int, share: str) -> str:
        (first, began), (last, now) = self._times[0], self._times[-1]
        if last == first or now <= began:
            return ""
        per_step = (now - began) / (last - first)
        tokens = f"  {self.tokens / per_step:,.0f} tokens/s" if self.tokens else ""
        return (
            f"{tokens}{share}  {per_step * 1e3:.0f} ms/step"
            f"  {_clock((self.total - done) * per_step)} left"
        )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
