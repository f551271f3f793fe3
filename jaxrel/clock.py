"""Time as an argument: what decides never reads a clock itself."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks of one process."""

    def wall_us(self) -> int:
        """Microseconds since the epoch; may step."""
        ...

    def monotonic_us(self) -> int:
        """Microseconds since some moment; never steps back."""
        ...


class SystemClock:
    """The machine's own."""

    def wall_us(self) -> int:
        """`time.time_ns`, in microseconds."""
        return time.time_ns() // 1000

    def monotonic_us(self) -> int:
        """`time.monotonic_ns`, in microseconds."""
        return time.monotonic_ns() // 1000
