"""Lines for a person that never make the writer wait.

A terminal that was halted, or a pipe whose reader is asleep, must not stop the process that
watches a job. What does not fit is kept up to a limit, then dropped from the oldest on, and
counted.
"""

import os
import select
import stat
import time

_KEPT = 1 << 20
"""Bytes."""


class Console:
    """A way to standard error that does not block."""

    def __init__(self, descriptor: int = 2) -> None:
        """Write to where `descriptor` leads."""
        self._descriptor, self._own = descriptor, False
        self._waiting = bytearray()
        self._dropped = 0
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
                # Opened anew, so that other users of the same pipe keep waiting as they expect.
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self._descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
                self._own = True
        except OSError:
            pass  # then it may wait: a socket, or a terminal of another user

    def say(self, line: str) -> None:
        """A line of our own; control characters of names do not reach the terminal."""
        text = "".join(c if c.isprintable() else "?" for c in line)
        self.write(text.encode("utf-8", "replace") + b"\n")

    def write(self, data: bytes) -> None:
        """Bytes as they are."""
        self._waiting += data
        self.flush()
        if len(self._waiting) > _KEPT:
            kept = self._waiting.find(b"\n", len(self._waiting) - _KEPT) + 1
            self._dropped += self._waiting[:kept].count(b"\n")
            del self._waiting[:kept]

    def flush(self, wait_s: float = 0.0) -> None:
        """Hand over what is waiting, as far as it is taken within `wait_s`."""
        ends = time.monotonic() + wait_s
        while self._waiting or self._dropped:
            if self._dropped:
                note = f"({self._dropped} lines were left out: nobody read them)\n".encode()
                self._waiting[:0], self._dropped = note, 0
            try:
                if not select.select([], [self._descriptor], [], max(0.0, ends - time.monotonic()))[
                    1
                ]:
                    return
                taken = os.write(self._descriptor, self._waiting[: select.PIPE_BUF])
            except BlockingIOError:
                if time.monotonic() >= ends:
                    return
                time.sleep(0.01)
                continue
            except (OSError, ValueError):
                self._waiting.clear()  # nobody is there any more
                return
            del self._waiting[:taken]

    def close(self) -> None:
        """Hand over the rest, within a second."""
        self.flush(1.0)
        if self._own:
            os.close(self._descriptor)
            self._own = False
