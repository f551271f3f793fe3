"""Durations and counts as people type them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrel.exit_codes import UsageError
from jaxrel.plan.quantities import count, duration

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3h", 10800), ("2m", 120), ("90", 90), ("1.5d", 129600), ("250ms", 0.25), ("0", 0),
        ("10s", 10), (".5h", 1800), ("5.m", 300), (" 7 h ", 25200), ("0.001", 0.001),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert duration(text, "mtbf") == seconds


@pytest.mark.parametrize(
    "text",
    ["", "h", "3x", "3 hours", "-3h", "+3", "1h30m", "1e3", "nan", "inf", "3H", "1,5", ".", "٣h",
     "9" * 400, "3h\n4"],
)  # fmt: skip
def test_no_durations(text: str) -> None:
    with pytest.raises(
        UsageError, match="^mtbf: got '.*: expected seconds, or a number and"
    ) as got:
        duration(text, "mtbf")
    assert "\n" not in str(got.value) and len(str(got.value)) < 160


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("70B", 70 * 10**9), ("8M", 8 * 10**6), ("7.3b", 7_300_000_000), ("1.5K", 1500),
        ("2T", 2 * 10**12), ("70553706496", 70553706496), ("0", 0), ("3.0", 3), ("0.1B", 10**8),
        ("1000000T", 10**18),
    ],
)  # fmt: skip
def test_counts(text: str, number: int) -> None:
    made = count(text, "params")
    assert made == number and type(made) is int


@pytest.mark.parametrize(
    "text",
    ["", "B", "1.5", "-8M", "8 million", "8G", "1e9", "nan", "0.0001K", "1000001T", "٨M", "8MB",
     "9" * 400, "5\u212a"],
)  # fmt: skip
def test_no_counts(text: str) -> None:
    with pytest.raises(UsageError, match="^params: got '.*: expected a whole number, or") as got:
        count(text, "params")
    assert len(str(got.value)) < 160


@given(st.text(max_size=8))
def test_anything_is_read_or_refused_in_one_line(text: str) -> None:
    for read in (duration, count):
        try:
            assert read(text, "x") >= 0
        except UsageError as error:
            assert len(str(error).splitlines()) == 1
