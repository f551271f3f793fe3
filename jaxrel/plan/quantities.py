"""Quantities as people type them: durations and counts."""

import math
import re
from decimal import Decimal

from jaxrel.config import show
from jaxrel.exit_codes import UsageError

_SECONDS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_ONES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST = 10**18
_RANGES = {"overlap": (0, 1), "mtbf": (1e-9, 1e12)}
_RANGES |= dict.fromkeys(("interval", "period", "work"), (1e-12, 1e15))
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"


def duration(text: str, name: str) -> float:
    """Seconds in `text`: a number and ms, s, m, h or d; seconds without a unit.

    "3h" is 10800.0, "1.5d" 129600.0, "250ms" 0.25. Raises UsageError, beginning with `name`.
    """
    found = re.fullmatch(rf"{_NUMBER} ?(|ms|s|m|h|d)", text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else math.inf
    if seconds == math.inf:
        raise UsageError(
            f"{name}: got {show(text)}: expected seconds, or a number and ms, s, m, h or d"
        )
    return seconds


def count(text: str, name: str) -> int:
    """The whole number in `text`: a number and, if you like, K, M, B or T (thousands).

    "70B" is 70 * 10**9, "1.5k" 1500. Raises UsageError, beginning with `name`.
    """
    found = re.fullmatch(rf"{_NUMBER} ?([KMBT]?)", text.strip(), re.ASCII | re.IGNORECASE)
    number = Decimal(found[1]) * _ONES[found[2].upper()] if found else Decimal("0.5")
    if number > _MOST or number != int(number):
        raise UsageError(
            f"{name}: got {show(text)}: expected a whole number, or one with K, M, B or T"
        )
    return int(number)


def check(**values: float) -> None:
    """Refuse what no formula of this room can use. Raises UsageError.

    Each value goes by its name: `overlap` is a share of 0 to 1, all others are seconds, and those
    that are divided by are not 0. Between the limits nothing overflows.
    """
    for name, value in values.items():
        low, high = _RANGES.get(name, (0, 1e12))
        if not low <= value <= high:
            unit = "" if name == "overlap" else " seconds"
            raise UsageError(f"{name}: got {value:g}: expected {low:g} to {high:g}{unit}")
