"""A Grain pipeline of the user's own, named `module:function` in data.pipeline.

    def batches(*, shard: int, num_shards: int, rows: int, sequence: int, seed: int)
            -> grain.MapDataset | grain.IterDataset

The function is called once for each logical shard, 0 to num_shards - 1. A shard is a group of
the global batch (batch.groups of them, for the life of the run), not a process: whichever
process owns a group reads its shard, so a run can continue on another number of processes.
The dataset's elements are the shard's batches: dicts of arrays with `rows` rows
(batch.global_size / batch.groups), the same names, dtypes and shapes each time. The
reference model reads "tokens", integers [rows, sequence + 1].

The shards together should be the data, each element once; the order must follow from the
arguments alone, and the dataset must not end before the run does (`.repeat()`). What the
function does in threads or worker processes is its own affair. The module is looked for in
the current folder too.
"""

import contextlib
import hashlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from jaxrel.data.feed import checked_leaves, leaf_kinds
from jaxrel.exit_codes import DataRefusedError, FailedError, UsageError

Dataset = grain.MapDataset | grain.IterDataset


def load(
    name: str, *, rows: int, sequence: int, groups: int, seed: int
) -> tuple[Callable[[int], Dataset], dict[str, Any]]:
    """A function from a group to its dataset, and the fingerprint of the pipeline.

    The fingerprint is of shard 0, whose first batch is read by an iterator that is thrown
    away, so it is the same in every process. UsageError: there is no such function, or it
    does not give a Grain dataset. DataRefusedError: its first batch is not as agreed.
    FailedError: reading failed.
    """
    function = _find(name)

    def open_shard(shard: int) -> Dataset:
        try:
            dataset = function(
                shard=shard, num_shards=groups, rows=rows, sequence=sequence, seed=seed
            )
        except Exception as error:
            raise UsageError(f"data.pipeline {name} failed: {_where(error)}") from error
        if not isinstance(dataset, Dataset):
            raise UsageError(
                f"data.pipeline {name} returned a {type(dataset).__name__}, expected a "
                "grain.MapDataset or grain.IterDataset"
            )
        return dataset

    dataset = open_shard(0)
    first = _first_batch(dataset, name, rows)
    digest = hashlib.blake2b(digest_size=8)
    for leaf_name in sorted(first):
        digest.update(np.ascontiguousarray(first[leaf_name]).tobytes())
    return open_shard, {
        "kind": "pipeline",
        "pipeline": name,
        "source_hash": _source_hash(function),
        "transforms": _transforms(dataset),
        "leaves": leaf_kinds(first),
        "first_batch": digest.hexdigest(),
    }


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"data.pipeline {name!r}: expected module:function")
    if os.getcwd() not in sys.path:  # last, so that it hides nothing
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"data.pipeline {name}: cannot import {module_name}: {_where(error)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        state = "is not a function" if hasattr(module, function_name) else "does not exist"
        raise UsageError(f"data.pipeline {name}: {function_name} {state} in {module.__name__}")
    return function


def _first_batch(dataset: Dataset, name: str, rows: int) -> dict[str, np.ndarray]:
    if isinstance(dataset, grain.MapDataset):
        dataset = dataset.to_iter_dataset(grain.ReadOptions(0, 0))
    with contextlib.closing(iter(dataset)) as iterator:
        try:
            batch = next(iterator)
        except StopIteration:
            raise DataRefusedError(f"data.pipeline {name}: shard 0 has no batch") from None
        except Exception as error:
            raise FailedError(
                f"data.pipeline {name}: reading its first batch failed: {_where(error)}"
            ) from error
        return checked_leaves(batch, rows, f"data.pipeline {name}")


def _transforms(dataset: Dataset) -> list[str]:
    """The kinds of dataset that this one is made of, and how many elements each has.

    Options are left out: those of reading ahead may change, and others show in the batch.
    """
    name = type(dataset).__name__
    if isinstance(dataset, grain.MapDataset):
        name += f" {len(dataset)}"
    return [step for parent in dataset.parents for step in _transforms(parent)] + [name]


def _source_hash(function: Callable[..., Any]) -> str | None:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # built in, or typed into a prompt
        return None
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()


def _where(error: Exception) -> str:
    """The error on one line, with the place in the user's code that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message} ({os.path.basename(last.filename)}:{last.lineno})"
