"""Which checkpoints go: a pure decision."""

import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st

from jaxrel.checkpoint.listing import Entry
from jaxrel.checkpoint.retention import Retention
from jaxrel.exit_codes import UsageError


def entry(step: int, status: str = "committed", **fields: object) -> Entry:
    return Entry(step, epath.Path(f"/c/{step}"), status, **fields)  # type: ignore[arg-type]


def doomed(retention: Retention, *entries: Entry) -> list[int]:
    return [e.step for e in retention.doomed(entries)]


def test_the_newest_good_ones_stay() -> None:
    assert doomed(Retention(2), entry(1), entry(2), entry(3)) == [1]
    assert doomed(Retention(2), entry(1), entry(2)) == []
    assert doomed(Retention(2), entry(1), entry(2), entry(3, "corrupt")) == []


def test_what_is_damaged_or_aside_goes_only_behind_the_good() -> None:
    kept = [entry(2), entry(4)]
    assert doomed(Retention(2), entry(1, "corrupt"), *kept) == [1]
    assert doomed(Retention(2), entry(2), entry(3, "corrupt"), entry(4)) == []
    assert doomed(Retention(2), entry(2, "aside"), *kept, entry(5, "aside")) == [2]


def test_foreign_and_unfinished_entries_are_never_touched() -> None:
    strange = [entry(1, "foreign"), entry(2, "incomplete")]
    assert doomed(Retention(2), *strange, entry(3), entry(4), entry(5)) == [3]


def test_every_nth_best_and_trusted_stay() -> None:
    many = [entry(step, metric=abs(step - 3.2)) for step in range(1, 11)]
    assert doomed(Retention(2, every=4), *many) == [1, 2, 3, 5, 6, 7]
    assert doomed(Retention(2, best=2), *many) == [1, 2, 5, 6, 7, 8]  # 3 and 4
    trusted = [entry(1, trusted=True), entry(2, trusted=True), *map(entry, (3, 4, 5))]
    assert doomed(Retention(2), *trusted) == [1, 3]


def test_a_keep_below_two_is_refused() -> None:
    with pytest.raises(UsageError, match="keep: got 1: expected at least 2, so that there is an"):
        Retention(1)
    with pytest.raises(UsageError, match="keep_best: got -1: expected 0 or more"):
        Retention(2, best=-1)


STATUSES = ["committed", "verified", "corrupt", "incomplete", "foreign", "aside"]


@given(
    st.lists(st.sampled_from(STATUSES), max_size=12),
    st.integers(2, 4),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_never_fewer_good_ones_than_asked(
    statuses: list[str], keep: int, every: int, best: int
) -> None:
    entries = [entry(step, status, metric=step % 3) for step, status in enumerate(statuses)]
    gone = {e.step for e in Retention(keep, every, best).doomed(entries)}
    good = [e.step for e in entries if e.good]
    left = [step for step in good if step not in gone]
    assert left[-keep:] == good[-keep:]
    assert all(statuses[step] not in ("foreign", "incomplete") for step in gone)
