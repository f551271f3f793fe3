"""Drawing batches from one Grain iterator a group, and knowing where each of them stands."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from jaxrel.data.windows import batch_position
from jaxrel.exit_codes import DataRefusedError, FailedError


def read_ahead(
    dataset: grain.MapDataset | grain.IterDataset, threads: int, prefetch: int
) -> grain.IterDataset:
    """The dataset with `prefetch` batches read ahead by threads; 0 of either reads none ahead."""
    if isinstance(dataset, grain.MapDataset):
        options = grain.ReadOptions(min(threads, prefetch), prefetch)
        return dataset.to_iter_dataset(options)
    if threads and prefetch:
        return grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=prefetch)
    return dataset


def checked_leaves(batch: Any, rows: int, what: str) -> dict[str, np.ndarray]:
    """The batch as arrays [rows, ...] by name; DataRefusedError, beginning with `what`, if not."""
    if not isinstance(batch, Mapping) or not batch:
        raise DataRefusedError(f"{what}: a batch is a {type(batch).__name__}, not a dict of arrays")
    leaves = {str(name): np.asarray(leaf) for name, leaf in batch.items()}
    for name, leaf in leaves.items():
        if leaf.dtype.kind in "OSUmM":
            raise DataRefusedError(f"{what}: {name} is of dtype {leaf.dtype}, expected numbers")
        if leaf.shape[:1] != (rows,):
            raise DataRefusedError(
                f"{what}: {name} has shape {list(leaf.shape)}, expected {rows} rows "
                "(batch.global_size / batch.groups) on its first axis"
            )
    return leaves


def leaf_kinds(leaves: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Each leaf's dtype and shape, as the fingerprint records them."""
    return {name: f"{leaf.dtype} {list(leaf.shape)}" for name, leaf in sorted(leaves.items())}


class GroupFeed:
    """The batches of some groups, each group from a Grain iterator of its own.

    `open_group(g)` gives group g's batches from position 0. With `by_position`, the iterator's
    state is nothing but the position, so that any step can be started from without a state.
    """

    def __init__(
        self,
        open_group: Callable[[int], grain.IterDataset],
        *,
        name: str,
        fingerprint: dict[str, Any],
        groups: Sequence[int],
        rows: int,
        skip: Sequence[int],
        by_position: bool,
    ) -> None:
        self.fingerprint = fingerprint
        self._open_group = open_group
        self._name = name
        self._groups = list(groups)
        self._rows = rows
        self._skip = skip
        self._by_position = by_position
        self._iterators: dict[int, grain.DatasetIterator] = {}
        self._step = self._position = 0

    def start(self, step: int, state: dict[str, Any] | None) -> None:
        """Make the next batch that of `step`; `state` is a merged one, None at step 0.

        Raises DataRefusedError when the state is absent where one is needed, is of another
        step, lacks a group, or lies beyond the batch that the skipped positions now call for.
        """
        self.close()
        target = batch_position(step, self._skip)
        if state is not None and state["step"] != step:
            raise DataRefusedError(
                f"{self._name}: the position is that of step {state['step']}, not of step {step}"
            )
        position, states = 0, {}
        if self._by_position:
            position = target
            states = {str(g): {"next_index": target} for g in self._groups}
        elif state is not None:
            position, states = state["position"], state["groups"]
        elif step:
            raise DataRefusedError(f"{self._name}: step {step} was saved without a data position")
        if position > target:
            raise DataRefusedError(
                f"{self._name}: {position} batches were drawn before step {step}, but data.skip "
                f"now makes that batch {target}: batches once skipped stay skipped"
            )
        self._step, self._position = step, position
        self._iterators = {g: iter(self._open_group(g)) for g in self._groups}
        if states:
            for group, iterator in self._iterators.items():
                self._restore(group, iterator, states.get(str(group)))

    def __next__(self) -> dict[str, np.ndarray]:
        """The next batch: every leaf [groups, rows, ...]."""
        if not self._iterators:
            raise RuntimeError("the feed is not started, or is closed")
        target = batch_position(self._step, self._skip)
        try:
            while self._position < target:
                for group in self._groups:
                    self._draw(group)
                self._position += 1
            drawn = [self._draw(group) for group in self._groups]
        except BaseException:
            self.close()  # some groups may be a batch ahead: there is no position to save
            raise
        self._position += 1
        self._step += 1
        return {name: np.stack([leaves[name] for leaves in drawn]) for name in drawn[0]}

    def get_state(self) -> dict[str, Any]:
        """Where the groups stand after the batches handed out, ready for JSON."""
        if not self._iterators:
            raise FailedError(f"{self._name}: there is no position, the feed failed or is closed")
        state = {
            "step": self._step,
            "position": self._position,
            "of": self.fingerprint["groups"],
            "groups": {str(g): iterator.get_state() for g, iterator in self._iterators.items()},
        }
        try:
            return json.loads(json.dumps(state))
        except TypeError as error:
            raise FailedError(f"{self._name}: an iterator's state is not JSON: {error}") from error

    def close(self) -> None:
        """Stop reading ahead; `start` may be called again."""
        iterators, self._iterators = self._iterators, {}
        for iterator in iterators.values():
            iterator.close()

    def _restore(self, group: int, iterator: grain.DatasetIterator, state: Any) -> None:
        if state is None:
            raise DataRefusedError(f"{self._name}: the position of group {group} was not saved")
        try:
            iterator.set_state(state)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DataRefusedError(
                f"{self._name}: group {group} cannot continue from its position: {error!r}"
            ) from error

    def _draw(self, group: int) -> dict[str, np.ndarray]:
        try:
            batch = next(self._iterators[group])
        except StopIteration:
            raise DataRefusedError(
                f"{self._name}: group {group} ended after {self._position} batches, at step "
                f"{self._step}: repeat the dataset, or set run.steps to {self._step}"
            ) from None
        what = f"{self._name}, group {group} at step {self._step}"
        leaves = checked_leaves(batch, self._rows, what)
        if (kinds := leaf_kinds(leaves)) != self.fingerprint["leaves"]:
            raise DataRefusedError(
                f"{what}: gave {kinds}, the first batch was {self.fingerprint['leaves']}"
            )
        return leaves
