"""A save from its call to its commit."""

import threading
import time
from dataclasses import dataclass, field

from jaxrel.checkpoint.errors import SaveFailedError, may_pass, one_line


@dataclass(frozen=True)
class Landed:
    """A save that is complete on disk."""

    step: int
    seconds: float
    """From the call of `save` to the commit."""
    blocking_s: float
    """Of that, what `save` itself took."""
    state_digest: str


@dataclass
class Flight:
    """A save on its way to disk."""

    step: int
    thread: threading.Thread
    state_digest: str
    started: float
    handed_over: float = field(default_factory=time.monotonic)
    committed: float | None = None
    error: BaseException | None = None

    def landed(self) -> Landed:
        """What the thread made of it, once it is dead. Raises SaveFailedError."""
        if self.error is not None:
            line = one_line(self.error)
            what = f"failed: {line}"
            raise SaveFailedError(self.step, what, may_pass=may_pass(line)) from self.error
        assert self.committed is not None
        seconds, blocking_s = self.committed - self.started, self.handed_over - self.started
        return Landed(self.step, seconds, blocking_s, self.state_digest)
