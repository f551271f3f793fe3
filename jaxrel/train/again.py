"""A save that failed for a reason that may pass is made again, a little later each time."""

import time
from collections.abc import Callable

from jaxrel.checkpoint.errors import SaveFailedError

_TRIES, _FIRST_PAUSE_S = 4, 1.0


class Again:
    """Whether, and when, to save after a failure.

    The arrays of the failed save are gone: what is saved again is the state of the step that the
    loop has reached by then.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._at: float | None = None

    def failed(self, error: SaveFailedError) -> float | None:
        """Seconds until the next try; None where another one makes no sense."""
        self._failures += 1
        if not error.may_pass or self._failures >= _TRIES:
            return None
        pause = _FIRST_PAUSE_S * 2 ** (self._failures - 1)
        self._at = self._clock() + pause
        return pause

    @property
    def left_s(self) -> float | None:
        """Seconds until the next try, 0 when it is due; None if none is wanted."""
        return None if self._at is None else max(0.0, self._at - self._clock())

    def begun(self) -> None:
        """A save is on its way, by whatever reason."""
        self._at = None

    def landed(self) -> None:
        """A save is complete."""
        self._failures = 0
