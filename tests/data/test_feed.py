"""The batches of a corpus, as the training loop draws them."""

import dataclasses
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrel.config import BatchConfig, DataConfig
from jaxrel.data.pipeline import Feed, check_fingerprint, merge_states, open_feed
from jaxrel.data.store import TokenStream
from jaxrel.data.windows import window_ids
from jaxrel.exit_codes import DataRefusedError, FailedError, JaxrelError

BATCH = BatchConfig(global_size=24, sequence=16, groups=8)
ALL = range(8)
SEED = 7


def feed_of(corpus: Path, groups: Any = ALL, batch: BatchConfig = BATCH, **data: Any) -> Feed:
    return open_feed(DataConfig(**data), batch, seed=SEED, groups=groups, corpus=corpus)


def draw(feed: Feed, start: int, count: int, state: dict | None = None) -> np.ndarray:
    """Tokens of `count` batches: [count, groups, rows, sequence + 1]."""
    feed.start(start, state)
    batches = [next(feed) for _ in range(count)]
    feed.close()
    assert all(list(batch) == ["tokens"] for batch in batches)
    return np.stack([batch["tokens"] for batch in batches])


def expected(corpus: Path, steps: Any, skip: Any = (), split: str = "train") -> np.ndarray:
    """What the batches of `steps` must be, cut from the stream by hand."""
    stream = TokenStream(corpus, split)
    whole = stream.read(0, stream.split.tokens)
    windows = (len(whole) - 1) // 16
    ids = [window_ids(t, seed=SEED, windows=windows, batch=24, skip=skip) for t in steps]
    rows = [[whole[w * 16 : w * 16 + 17] for w in step] for step in ids]
    return np.array(rows).reshape(len(rows), 8, 3, 17)


def epoch_edge(corpus: Path) -> int:
    """The step whose batch spans the first two epochs."""
    windows = feed_of(corpus).fingerprint["windows"]
    assert windows % 24
    return windows // 24


@pytest.mark.core
def test_batches_are_the_windows_that_window_ids_names(corpus: Path) -> None:
    edge = epoch_edge(corpus)
    drawn = draw(feed_of(corpus), 0, edge + 3)
    assert drawn.dtype == np.int32
    np.testing.assert_array_equal(drawn, expected(corpus, range(edge + 3)))
    stream = TokenStream(corpus, "train")
    inputs = drawn[..., :-1].reshape(-1, 16)[: feed_of(corpus).fingerprint["windows"]]
    whole = stream.read(0, len(inputs) * 16).reshape(-1, 16)
    np.testing.assert_array_equal(sorted(inputs.tolist()), sorted(whole.tolist()))


@pytest.mark.core
def test_any_step_can_be_started_from(corpus: Path) -> None:
    edge = epoch_edge(corpus)
    feed = feed_of(corpus)
    whole = draw(feed, 0, edge + 20)
    for start in (0, 1, 17, edge - 1, edge, edge + 1, edge + 19):
        count = min(4, edge + 20 - start)
        np.testing.assert_array_equal(draw(feed, start, count), whole[start : start + count])
        again = draw(feed_of(corpus), start, count)
        np.testing.assert_array_equal(again, whole[start : start + count])


def test_a_fresh_process_draws_the_same(corpus: Path) -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from test_feed import *\n"
        "sys.stdout.buffer.write(draw(feed_of(Path(sys.argv[1])), 17, 3).tobytes())"
    )
    arguments = [sys.executable, "-c", program, corpus, Path(__file__).parent, *sys.path]
    done = subprocess.run(arguments, capture_output=True, check=True)
    assert done.stdout == draw(feed_of(corpus), 17, 3).tobytes()


@pytest.mark.core
@pytest.mark.parametrize(
    "owned", [[range(0, 4), range(4, 8)], [[0, 2, 5], [7, 1], [6], [3, 4]], [[g] for g in ALL]]
)
def test_processes_together_draw_the_global_batch(corpus: Path, owned: list) -> None:
    whole = draw(feed_of(corpus), 11, 4)
    for groups in owned:
        np.testing.assert_array_equal(draw(feed_of(corpus, groups), 11, 4), whole[:, list(groups)])


def test_each_process_reads_only_its_rows(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(corpus, tmp_path / "mine")  # other feeds may still be reading ahead
    starts = []
    read = TokenStream.read

    def recorded(self: TokenStream, start: int, count: int) -> np.ndarray:
        if self.folder == tmp_path / "mine":
            starts.append(start)
        return read(self, start, count)

    monkeypatch.setattr(TokenStream, "read", recorded)
    feed = feed_of(tmp_path / "mine", [2, 5], threads=0)
    draw(feed, 4, 1)
    known = {key: feed.fingerprint[key] for key in ("seed", "windows", "batch")}
    ids = window_ids(4, **known).reshape(8, 3)[[2, 5]]
    assert sorted(starts) == sorted(16 * ids.ravel())


@pytest.mark.core
def test_skipped_batches_are_left_out_from_any_start(corpus: Path) -> None:
    skip = (2, 9, 3)
    whole = draw(feed_of(corpus, skip=skip), 0, 12)
    np.testing.assert_array_equal(whole, expected(corpus, range(12), skip))
    np.testing.assert_array_equal(
        whole, draw(feed_of(corpus), 0, 15)[[0, 1, *range(4, 9), *range(10, 15)]]
    )
    for start in (1, 2, 6, 7, 8):
        np.testing.assert_array_equal(
            draw(feed_of(corpus, skip=skip), start, 3), whole[start : start + 3]
        )


@pytest.mark.parametrize(("threads", "prefetch"), [(0, 4), (1, 0), (1, 1), (3, 1), (40, 9)])
def test_reading_ahead_changes_nothing(corpus: Path, threads: int, prefetch: int) -> None:
    feed = feed_of(corpus, range(2, 7), threads=threads, prefetch=prefetch)
    np.testing.assert_array_equal(draw(feed, 5, 9), expected(corpus, range(5, 14))[:, 2:7])


@pytest.mark.core
def test_state_counts_what_was_handed_out_and_moves_between_processes(corpus: Path) -> None:
    whole = draw(feed_of(corpus), 0, 12)
    states = []
    for groups in ([0, 1, 2], [3], [4, 5, 6, 7]):
        feed = feed_of(corpus, groups, prefetch=8)
        feed.start(0, None)
        for _ in range(5):
            next(feed)
        states.append(json.loads(json.dumps(feed.get_state())))
        assert states[-1]["step"] == 5
        feed.close()
    merged = json.loads(json.dumps(merge_states(states[::-1])))
    for groups in (list(ALL), [6, 1]):
        np.testing.assert_array_equal(
            draw(feed_of(corpus, groups), 5, 7, merged), whole[5:, groups]
        )
    with pytest.raises(DataRefusedError, match="that of step 5, not of step 6"):
        feed_of(corpus).start(6, merged)


def states_of(corpus: Path, owned: list, step: int = 3) -> list[dict]:
    states = []
    for groups in owned:
        feed = feed_of(corpus, groups, threads=0)
        feed.start(step, None)
        states.append(feed.get_state())
    return states


def test_merging_names_missing_groups_and_disagreement(corpus: Path) -> None:
    with pytest.raises(DataRefusedError, match=r"groups \[2, 6\]"):
        merge_states(states_of(corpus, [[0, 1, 3], [4, 5, 7]]))
    shared = states_of(corpus, [range(5), range(3, 8)])
    assert list(merge_states(shared)["groups"]) == [str(g) for g in ALL]
    shared[1]["groups"]["4"] = {"next_index": 9}
    with pytest.raises(DataRefusedError, match="position of group 4"):
        merge_states(shared)
    with pytest.raises(DataRefusedError, match="step 3 and 4"):
        merge_states([*states_of(corpus, [range(4)]), *states_of(corpus, [range(4, 8)], step=4)])


def test_fingerprint_is_the_same_in_every_process_and_survives_json(corpus: Path) -> None:
    one = feed_of(corpus, [3], threads=1, prefetch=1, skip=(4,)).fingerprint
    check_fingerprint(json.loads(json.dumps(one)), feed_of(corpus).fingerprint)


@pytest.mark.core
def test_another_fingerprint_is_refused_by_name(corpus: Path, tmp_path: Path) -> None:
    def fingerprint(
        folder: Path = corpus, split: str = "train", seed: int = SEED, **batch: int
    ) -> dict:
        size = dataclasses.replace(BATCH, **batch)
        return open_feed(
            DataConfig(), size, seed=seed, groups=[0], corpus=folder, split=split
        ).fingerprint

    shutil.copytree(corpus, tmp_path / "moved")
    now = fingerprint(tmp_path / "moved")
    check_fingerprint(fingerprint(), now)
    for field, saved in [
        ("seed was 8, is 7", fingerprint(seed=8)),
        ("batch was 48, is 24", fingerprint(global_size=48)),
        ("sequence was 8, is 16", fingerprint(sequence=8)),
        ("groups was 4, is 8", fingerprint(groups=4)),
        ("content_hash was '", fingerprint(split="held_out")),
        ("split was 'held_out', is 'train'", fingerprint(split="held_out")),
        ("tokenizer was 'other', is 'bytes'", {**now, "tokenizer": "other"}),
        ("order was '0', is '", {**now, "order": "0"}),
        ("kind was None, is 'corpus'", {k: v for k, v in now.items() if k != "kind"}),
        ("more was 1, is None", {**now, "more": 1}),
    ]:
        with pytest.raises(DataRefusedError) as refused:
            check_fingerprint(saved, now)
        assert field in str(refused.value)


@pytest.mark.parametrize(
    ("code", "message", "change"),
    [
        (65, r"0 windows of batch.sequence 99999 \+ 1: fewer than", {"sequence": 99_999}),
        (65, "windows .* fewer than batch.global_size 8000", {"global_size": 8000}),
        (64, "batch.groups 5 does not divide batch.global_size 24", {"groups": 5}),
        (64, "batch.groups is 0", {"groups": 0}),
        (64, "batch.global_size is -8", {"global_size": -8}),
        (64, "batch.sequence is 0", {"sequence": 0}),
        (64, "data.skip is -1", {"skip": (3, -1)}),
        (64, "data.threads is -1", {"threads": -1}),
        (64, "data.prefetch is -2", {"prefetch": -2}),
        (64, "only one can be used", {"pipeline": "a:b"}),
        (64, r"groups \[\]", {"owned": []}),
        (64, r"groups \[1, 1\]", {"owned": [1, 1]}),
        (64, r"groups \[8\]", {"owned": [8]}),
        (65, "is not a corpus", {"corpus": "/nowhere"}),
    ],
)
def test_settings_that_cannot_work(corpus: Path, code: int, message: str, change: dict) -> None:
    change = {"owned": [0], "corpus": corpus} | change
    size = {key: change.pop(key) for key in ("global_size", "sequence", "groups") if key in change}
    batch = dataclasses.replace(BATCH, **size)
    with pytest.raises(JaxrelError, match=message) as refused:
        feed_of(Path(change.pop("corpus")), change.pop("owned"), batch, **change)
    assert refused.value.code == code and "\n" not in str(refused.value)


def test_held_out_opens_alike_without_the_skips(corpus: Path) -> None:
    data = DataConfig(corpus=str(corpus), skip=(0,))
    held = open_feed(data, BATCH, seed=SEED, groups=ALL, split="held_out")
    np.testing.assert_array_equal(draw(held, 1, 3), expected(corpus, [1, 2, 3], split="held_out"))


def test_the_default_is_the_standard_library(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrel.data.pipeline.standard_library_corpus", lambda: corpus)
    feed = open_feed(DataConfig(), BATCH, seed=SEED, groups=ALL)
    np.testing.assert_array_equal(draw(feed, 0, 2), expected(corpus, range(2)))


def test_a_damaged_record_stops_the_feed_without_a_position(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "c")
    path = tmp_path / "c" / "train.array_record"
    data = bytearray(path.read_bytes())
    data[20_000] ^= 1
    path.write_bytes(data)
    feed = feed_of(tmp_path / "c")
    feed.start(0, None)
    with pytest.raises(DataRefusedError, match=r"train\.array_record: record \d+ cannot be read"):
        for _ in range(99):
            next(feed)
    with pytest.raises(FailedError, match="there is no position"):
        feed.get_state()


def test_a_closed_feed_leaves_no_thread(corpus: Path) -> None:
    before = set(threading.enumerate())
    feed = feed_of(corpus, threads=4)
    draw(feed, 0, 3)
    with pytest.raises(RuntimeError, match="not started"):
        next(feed)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_the_argument_wins_over_the_configuration(corpus: Path) -> None:
    data = DataConfig(corpus="/nowhere")
    feed = open_feed(data, BATCH, seed=SEED, groups=ALL, corpus=corpus)
    np.testing.assert_array_equal(draw(feed, 0, 1), expected(corpus, range(1)))
