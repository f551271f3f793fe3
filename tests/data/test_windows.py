from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrel.config import BatchConfig, DataConfig
from jaxrel.data.pipeline import open_feed
from jaxrel.data.windows import batch_position, window_ids


@given(st.lists(st.integers(0, 40)), st.integers(0, 30))
def test_position_is_the_step_th_that_is_not_skipped(skip: list[int], step: int) -> None:
    assert batch_position(step, skip) == [p for p in range(100) if p not in skip][step]


@pytest.mark.core
@pytest.mark.parametrize(
    ("windows", "batch"), [(1, 1), (2, 2), (7, 3), (30, 29), (65, 65), (64, 10), (1000, 37)]
)
def test_an_epoch_is_each_window_once(windows: int, batch: int) -> None:
    steps = -(-3 * windows // batch)
    ids = [window_ids(t, seed=2**40, windows=windows, batch=batch) for t in range(steps)]
    assert all(i.shape == (batch,) and i.dtype.kind == "i" for i in ids)
    order = np.concatenate(ids)[: 3 * windows].reshape(3, windows)
    for epoch in order:  # though batches do not end where epochs do
        assert sorted(epoch) == list(range(windows))


def test_epochs_and_seeds_differ_and_no_seed_continues_another() -> None:
    def epoch(seed: int, number: int) -> bytes:
        return window_ids(number, seed=seed, windows=200, batch=200).tobytes()

    orders = [epoch(seed, number) for seed in range(5) for number in range(5)]
    assert len(set(orders)) == 25


def test_skipped_positions_take_their_windows_with_them() -> None:
    plain = [window_ids(t, seed=1, windows=99, batch=8) for t in range(8)]
    skipping = [window_ids(t, seed=1, windows=99, batch=8, skip=(5, 0, 5)) for t in range(6)]
    np.testing.assert_array_equal(skipping, [plain[p] for p in (1, 2, 3, 4, 6, 7)])


def test_the_fingerprint_has_what_window_ids_asks_for(corpus: Path) -> None:
    batch = BatchConfig(global_size=8, sequence=16, groups=2)
    feed = open_feed(DataConfig(), batch, seed=5, groups=[0, 1], corpus=corpus)
    known = {key: feed.fingerprint[key] for key in ("seed", "windows", "batch")}
    np.testing.assert_array_equal(
        window_ids(3, **known), window_ids(3, seed=5, windows=known["windows"], batch=8)
    )
