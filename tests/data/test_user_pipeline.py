"""A user's own Grain pipeline: resumed on other processes, refused when it is not as agreed."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrel.config import BatchConfig, DataConfig
from jaxrel.data.pipeline import Feed, check_fingerprint, merge_states, open_feed
from jaxrel.exit_codes import DataRefusedError, FailedError, JaxrelError

BATCH = BatchConfig(global_size=8, sequence=6, groups=4)
ALL = range(4)

SOURCE = """
import grain
import numpy as np

RECORDS = 100
reads = []

def example(i, sequence):
    reads.append(int(i))
    return {"tokens": np.full(sequence + 1, i, np.int32), "id": np.int64(i)}

def mapped(shard, num_shards, rows, sequence, seed):
    order = grain.MapDataset.range(RECORDS).shuffle(seed=seed).repeat()
    return order.map(lambda i: example(i, sequence)).batch(rows)[shard::num_shards]

def iterated(shard, num_shards, rows, sequence, seed):
    records = grain.MapDataset.range(shard, RECORDS, num_shards)
    kept = records.to_iter_dataset().filter(lambda i: i % 5 != 2)
    examples = kept.map(lambda i: example(i, sequence))
    shuffled = grain.experimental.WindowShuffleIterDataset(examples, window_size=16, seed=seed)
    return grain.experimental.RepeatIterDataset(shuffled).batch(rows, drop_remainder=True)

def sparse(shard, num_shards, rows, sequence, seed):
    order = grain.MapDataset.range(shard, RECORDS, num_shards).shuffle(seed=seed).repeat()
    kept = order.filter(lambda i: i % 3 != 0).map(lambda i: example(i, sequence))
    return kept.to_iter_dataset(grain.ReadOptions(2, 5)).batch(rows)

def once(shard, num_shards, rows, sequence, seed):
    numbers = grain.MapDataset.range(shard, RECORDS, num_shards)
    return numbers.map(lambda i: example(i, sequence)).batch(rows)

def number(**_): return 3
def listed(**_): return [{"tokens": np.zeros((2, 7))}]
def picky(shard, num_shards): return once(shard, num_shards, 2, 6, 0)
def raising(**_): raise KeyError("no\\nsuch key")
def batches(x): return grain.MapDataset.source([x] * 9)
def not_dicts(**_): return batches(np.zeros((2, 7)))
def no_rows(**_): return batches({"tokens": np.int32(1)})
def many_rows(**_): return batches({"tokens": np.zeros((2, 7)), "mask": np.zeros((3, 7))})
def texts(**_): return batches({"tokens": np.array(["a", "b"])})
def empty(**_): return grain.MapDataset.source([])
def broken(**_): return grain.MapDataset.range(9).map(lambda i: 1 // 0)
def uneven(shard, rows, **_):
    odd = 3 if shard == 2 else None
    return grain.MapDataset.range(9).map(lambda i: {"x": np.zeros((rows, 5 + (i == odd)))})
"""

SHAPES = ("mapped", "iterated", "sparse")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Writes the module, with replacements, where only the current folder makes it found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write_module(*replacements: tuple[str, str]) -> None:
        source = SOURCE
        for old, new in replacements:
            assert old in source
            source = source.replace(old, new)
        (tmp_path / "mine.py").write_text(source)
        sys.modules.pop("mine", None)

    write_module()
    yield write_module
    sys.modules.pop("mine", None)


def feed_of(name: str, groups: Sequence[int] = ALL, seed: int = 3, **data: Any) -> Feed:
    config = DataConfig(pipeline=f"mine:{name}", **data)
    return open_feed(config, BATCH, seed=seed, groups=groups)


def draw(feed: Feed, count: int) -> np.ndarray:
    """Record ids of the next `count` batches: [count, groups, rows]."""
    batches = [next(feed) for _ in range(count)]
    for batch in batches:
        assert batch["tokens"].shape == (*batch["id"].shape, 7)
        np.testing.assert_array_equal(batch["tokens"][..., 0], batch["id"])
    return np.array([batch["id"] for batch in batches])


def run(name: str, steps: int, groups: Sequence[int] = ALL, **data: Any) -> np.ndarray:
    feed = feed_of(name, groups, **data)
    feed.start(0, None)
    ids = draw(feed, steps)
    feed.close()
    return ids


def saved_after(name: str, steps: int, owned: Sequence[Sequence[int]], **data: Any) -> dict:
    states = []
    for groups in owned:
        feed = feed_of(name, groups, **data)
        feed.start(0, None)
        draw(feed, steps) if steps else None
        states.append(json.loads(json.dumps(feed.get_state())))
        feed.close()
    return json.loads(json.dumps(merge_states(states)))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(  # iterated: 16 ids a window, 20 an epoch, 2 a batch
    "steps", [0, 3, pytest.param(8, marks=pytest.mark.core), 10, 13]
)
def test_another_process_count_continues_exactly(name: str, steps: int, write: Callable) -> None:
    whole = run(name, steps + 5)
    for before, after in [([ALL], [[0, 1], [3, 2]]), ([[0], [3], [1], [2]], [ALL])]:
        state = saved_after(name, steps, before)
        for groups in after:
            feed = feed_of(name, groups, threads=0)
            feed.start(steps, state)
            np.testing.assert_array_equal(draw(feed, 5), whole[steps:, list(groups)])
            feed.close()


def test_a_fresh_process_continues_exactly(write: Callable, tmp_path: Path) -> None:
    state = saved_after("iterated", 5, [ALL])
    (tmp_path / "state.json").write_text(json.dumps(state))
    program = (
        "import json, sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_user_pipeline import *\n"
        "feed = feed_of('iterated', [1, 2]); feed.start(5, json.load(open('state.json')))\n"
        "print(draw(feed, 6).tolist()); feed.close()"
    )
    arguments = [sys.executable, "-c", program, Path(__file__).parent, *sys.path]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == run("iterated", 11)[5:, 1:3].tolist()


def test_a_shuffled_dataset_gives_each_record_once_an_epoch(write: Callable) -> None:
    ids = run("mapped", 25).reshape(2, 100)
    assert [sorted(epoch) for epoch in ids.tolist()] == [list(range(100))] * 2
    assert ids[0].tolist() != ids[1].tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_reading_ahead_changes_neither_batches_nor_states(name: str, write: Callable) -> None:
    whole = run(name, 13, threads=0)
    states = [
        saved_after(name, 7, [[0, 2], [1, 3]], threads=threads, prefetch=prefetch)
        for threads, prefetch in [(0, 0), (1, 1), (8, 30)]
    ]
    assert states == states[:1] * 3
    feed = feed_of(name, threads=5, prefetch=9)
    feed.start(7, states[0])
    np.testing.assert_array_equal(draw(feed, 6), whole[7:])
    feed.close()


@pytest.mark.parametrize("name", SHAPES)
def test_skipped_batches_are_drawn_and_dropped(name: str, write: Callable) -> None:
    whole = run(name, 11)
    np.testing.assert_array_equal(run(name, 8, skip=(0, 4, 5)), whole[[1, 2, 3, *range(6, 11)]])
    state = saved_after(name, 5, [ALL], skip=(1,))  # 0, 2, 3, 4 and 5 are gone
    feed = feed_of(name, skip=(1, 7, 6))
    feed.start(5, state)
    np.testing.assert_array_equal(draw(feed, 3), whole[[8, 9, 10]])
    feed.close()
    with pytest.raises(DataRefusedError, match="6 batches were drawn before step 5, but data.skip"):
        feed_of(name).start(5, state)


@pytest.mark.core
def test_a_resume_without_its_position_is_refused(write: Callable) -> None:
    feed = feed_of("iterated", [1, 2])
    with pytest.raises(DataRefusedError, match="step 4 was saved without a data position"):
        feed.start(4, None)
    state = saved_after("iterated", 4, [ALL])
    with pytest.raises(DataRefusedError, match="step 4, not of step 5"):
        feed.start(5, state)
    del state["groups"]["2"]
    with pytest.raises(DataRefusedError, match="position of group 2 was not saved"):
        feed.start(4, state)
    state["groups"]["2"] = {"wrong": 1}
    with pytest.raises(DataRefusedError, match="group 2 cannot continue"):
        feed.start(4, state)


def test_the_fingerprint_reads_nothing_away_and_is_the_same_everywhere(write: Callable) -> None:
    feed = feed_of("mapped", [2], threads=0)
    reads = sys.modules["mine"].reads
    peeked = list(reads)
    assert len(peeked) == 2  # one batch of shard 0, by an iterator of its own
    feed.start(0, None)
    assert draw(feed, 1).ravel().tolist() == reads[2:]
    for name in SHAPES:
        one, other = feed_of(name, [3], threads=0), feed_of(name, [0, 1], prefetch=9)
        check_fingerprint(json.loads(json.dumps(one.fingerprint)), other.fingerprint)
        assert one.fingerprint["leaves"] == {"id": "int64 [2]", "tokens": "int32 [2, 7]"}


@pytest.mark.core
@pytest.mark.parametrize("name", SHAPES)
def test_another_pipeline_is_refused_by_name(name: str, write: Callable) -> None:
    saved = feed_of(name).fingerprint
    changes = {
        "first_batch": ("np.int64(i)", "np.int64(i + 1)"),
        "leaves": ("np.int64(i)", "np.int32(i)"),
        "transforms": ("RECORDS = 100", "RECORDS = 90"),
        "source_hash": (
            "num_shards, rows, sequence, seed):\n",
            "num_shards, rows, sequence, seed):  #\n",
        ),
    }
    for field, change in changes.items():
        write(change)
        with pytest.raises(DataRefusedError, match=f"{field} was "):
            check_fingerprint(saved, feed_of(name).fingerprint)
    write()
    with pytest.raises(DataRefusedError, match="seed was 3, is 4"):
        check_fingerprint(saved, feed_of(name, seed=4).fingerprint)
    check_fingerprint(saved, feed_of(name).fingerprint)


@pytest.mark.parametrize(
    ("pipeline", "code", "message"),
    [
        ("mine", 64, "expected module:function"),
        ("mine:", 64, "expected module:function"),
        (":once", 64, "expected module:function"),
        ("nomodule:f", 64, "cannot import nomodule: ModuleNotFoundError: No module named"),
        ("mine.part:f", 64, "cannot import mine.part"),
        ("mine:nothing", 64, "nothing does not exist in mine"),
        ("mine:RECORDS", 64, "RECORDS is not a function in mine"),
        ("mine:number", 64, "returned a int, expected a grain.MapDataset or grain.IterDataset"),
        ("mine:listed", 64, "returned a list"),
        ("mine:picky", 64, "TypeError: picky.* got an unexpected keyword argument 'rows'"),
        ("mine:raising", 64, r"KeyError: 'no\\nsuch key' \(mine.py:\d+\)"),
        ("mine:not_dicts", 65, "a batch is a ndarray, not a dict of arrays"),
        ("mine:no_rows", 65, r"tokens has shape \[\], expected 2 rows"),
        ("mine:many_rows", 65, r"mask has shape \[3, 7\], expected 2 rows"),
        ("mine:texts", 65, "tokens is of dtype <U1, expected numbers"),
        ("mine:empty", 65, "shard 0 has no batch"),
        ("mine:broken", 70, r"ZeroDivisionError: .* \(mine.py:\d+\)"),
        ("bad:f", 64, r"cannot import bad: SyntaxError"),
    ],
)
def test_wrong_pipelines_are_one_line(
    pipeline: str, code: int, message: str, write: Callable, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(JaxrelError, match=message) as refused:
        open_feed(DataConfig(pipeline=pipeline), BATCH, seed=0, groups=ALL)
    assert refused.value.code == code
    assert "\n" not in str(refused.value) and pipeline.rstrip(":") in str(refused.value)


def test_only_train_can_come_from_a_pipeline(write: Callable) -> None:
    with pytest.raises(JaxrelError, match="split held_out: only one"):
        open_feed(DataConfig(pipeline="mine:once"), BATCH, seed=0, groups=ALL, split="held_out")


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize(
    ("records", "message"),
    [
        (96, "group 0 ended after 12 batches, at step 12: repeat"),
        (100, r"step 12: id has shape \[1\]"),
    ],
)
def test_a_dataset_that_ends_says_at_which_step(
    threads: int, records: int, message: str, write: Callable
) -> None:
    write(("RECORDS = 100", f"RECORDS = {records}"))
    feed = feed_of("once", threads=threads)
    feed.start(0, None)
    draw(feed, 12)
    with pytest.raises(DataRefusedError, match=message):
        next(feed)
    with pytest.raises(FailedError, match="there is no position"):
        feed.get_state()


def test_a_batch_unlike_the_first_is_refused(write: Callable) -> None:
    feed = feed_of("uneven")
    feed.start(0, None)
    for _ in range(3):
        next(feed)
    with pytest.raises(
        DataRefusedError, match=r"group 2 at step 3: gave .*\[2, 6\].*first .*\[2, 5\]"
    ):
        next(feed)


def test_the_example_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2] / "scripts" / "examples")
    monkeypatch.setattr(sys, "path", list(sys.path))
    data = DataConfig(pipeline="my_pipeline:lines")
    feed = open_feed(data, BATCH, seed=0, groups=ALL)
    feed.start(0, None)
    batches = [next(feed)["tokens"] for _ in range(5)]
    feed.close()
    assert batches[0].shape == (4, 2, 7) and batches[0].dtype == np.int32
    lines = [
        bytes(row.astype("u1")).rstrip(b"\0").decode() for b in batches for row in b.reshape(-1, 7)
    ]
    assert len(set(lines[:20])) > 15 and "Beautif" in lines[:21]
