"""The batches of a run: from a corpus, or from a Grain pipeline of the user's own.

The position in the data is saved as the state of each group, so that another number of
processes can continue, together with a fingerprint of everything that the order of the data
follows from. Which batches are skipped may change during a run and is not part of it, and
neither are the numbers of processes, threads and batches read ahead.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxrel.config import BatchConfig, DataConfig
from jaxrel.data import user_pipeline, windows
from jaxrel.data.corpus import standard_library_corpus
from jaxrel.data.feed import GroupFeed, read_ahead
from jaxrel.exit_codes import DataRefusedError, UsageError


class Feed(Protocol):
    """What the training loop draws batches from, in each process."""

    fingerprint: dict[str, Any]
    """What the order of the data follows from: JSON, the same in every process."""

    def start(self, step: int, state: dict[str, Any] | None) -> None:
        """Make the next batch that of `step`; `state` is a merged state, None in a new run."""
        ...

    def __next__(self) -> dict[str, np.ndarray]:
        """The next batch of this process's groups: leaves [groups, B / G, ...]."""
        ...

    def get_state(self) -> dict[str, Any]:
        """This process's position after the batches handed out, ready for JSON."""
        ...

    def close(self) -> None:
        """Stop reading ahead."""
        ...


def open_feed(
    data: DataConfig,
    batch: BatchConfig,
    *,
    seed: int,
    groups: Sequence[int],
    corpus: Path | None = None,
    split: str = "train",
) -> Feed:
    """The batches of `groups`, those of the batch.groups that this process owns.

    They come from data.pipeline if it is set, else from the corpus in the folder `corpus`,
    data.corpus, or the standard library's. A corpus gives {"tokens": int32 [len(groups),
    global_size / groups, sequence + 1]} and can be started at any step without a state.
    `split` may be held_out for a corpus; data.skip is about train alone.

    Raises UsageError for settings that cannot work, DataRefusedError for data that cannot be
    used: a damaged corpus, or one of fewer windows than one batch (whose rows would repeat).
    """
    rows = _rows_of_a_group(data, batch, groups)
    folder = corpus or (Path(data.corpus) if data.corpus else None)
    shape = {"sequence": batch.sequence, "groups": batch.groups, "seed": seed}
    if data.pipeline:
        if folder or split != "train":
            other = "data.corpus" if folder else f"split {split}"
            raise UsageError(f"data.pipeline {data.pipeline} and {other}: only one can be used")
        make, fingerprint = user_pipeline.load(data.pipeline, rows=rows, **shape)
        name = f"data.pipeline {data.pipeline}"
    else:
        folder = folder or standard_library_corpus()
        make, fingerprint = windows.group_batches(folder, split, batch=batch.global_size, **shape)
        name = f"corpus {folder}"
    threads = max(1, data.threads // len(groups)) if data.threads else 0
    return GroupFeed(
        lambda group: read_ahead(make(group), threads, data.prefetch),
        name=name,
        fingerprint={**fingerprint, "batch": batch.global_size, **shape},
        groups=groups,
        rows=rows,
        skip=data.skip if split == "train" else (),
        by_position=not data.pipeline,
    )


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state from those of all processes, each with its own groups; in any order.

    Two processes may own the same group (a tensor axis across them) and then must agree.
    Raises DataRefusedError naming the groups that nobody has, or whatever differs.
    """
    groups: dict[str, Any] = {}
    for state in states:
        for key in ("step", "position", "of"):
            if state[key] != states[0][key]:
                raise DataRefusedError(
                    f"processes disagree on their data position: {key} {states[0][key]} and "
                    f"{state[key]}"
                )
        for group, position in state["groups"].items():
            if groups.setdefault(group, position) != position:
                raise DataRefusedError(f"processes disagree on the position of group {group}")
    wanted = range(states[0]["of"])
    if missing := [g for g in wanted if str(g) not in groups]:
        raise DataRefusedError(f"no process has the data position of groups {missing}")
    return {**states[0], "groups": {str(g): groups[str(g)] for g in wanted}}


def check_fingerprint(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise DataRefusedError naming each field in which the data is not what it was."""
    names = sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name))
    if names:
        fields = "; ".join(f"{n} was {saved.get(n)!r}, is {now.get(n)!r}" for n in names)
        other = " (data.corpus: another text)" if "content_hash" in names else ""
        raise DataRefusedError(f"the data is not what this run began with: {fields}{other}")


def _rows_of_a_group(data: DataConfig, batch: BatchConfig, groups: Sequence[int]) -> int:
    for name, value, least in (
        ("batch.global_size", batch.global_size, 1),
        ("batch.sequence", batch.sequence, 1),
        ("batch.groups", batch.groups, 1),
        ("data.threads", data.threads, 0),
        ("data.prefetch", data.prefetch, 0),
        ("data.skip", min(data.skip, default=0), 0),
    ):
        if value < least:
            raise UsageError(f"{name} is {value}: expected at least {least}")
    if batch.global_size % batch.groups:
        raise UsageError(
            f"batch.groups {batch.groups} does not divide batch.global_size {batch.global_size}"
        )
    if len(set(groups)) != len(groups) or not set(groups) <= set(range(batch.groups)) or not groups:
        raise UsageError(
            f"groups {list(groups)}: expected some of 0 to {batch.groups - 1}, each once"
        )
    return batch.global_size // batch.groups
