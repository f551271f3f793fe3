"""Reading a checkpoint back from disk, in pieces, without the model, JAX or an accelerator."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from jaxrel.checkpoint import listing, manifest, object_store
from jaxrel.checkpoint.errors import may_pass
from jaxrel.digest_host import as_hex, combine, kind, leaf_words, pieces

_INDEX = "_METADATA"
_PIECE = 2 << 20
"""Elements that are digested at a time."""

Pause = Callable[[int], None]
"""Called with the bytes that were just read; it may wait, or raise to give up."""


def bad_leaves(path: epath.Path, pause: Pause = lambda count: None) -> list[str]:
    """Paths of the leaves at `path`, a step's folder, that are not what was saved.

    A leaf that cannot be read is bad; if every leaf is right and the whole's digest is not,
    that is `(state digest)`; `(index)` is Orbax's own list of them. Holds one stored chunk in
    memory, and a few times `_PIECE` elements. Raises what `manifest.read` raises, and OSError.
    """
    found = manifest.read(path)
    bad, digests = [], {}
    for name, leaf in found["leaves"].items():
        try:
            digests[name] = as_hex(_words(path, name, leaf, pause))
        except ValueError as error:  # what TensorStore raises, whatever is wrong
            if may_pass(str(error)):
                raise OSError(f"{name}: {error}") from error
            bad.append(name)
            continue
        if digests[name] != leaf["digest"]:
            bad.append(name)
    if not _index_is_sound(path, [n for n, leaf in found["leaves"].items() if _size(leaf)]):
        bad.append("(index)")
    kinds = {name: kind(leaf["dtype"], leaf["shape"]) for name, leaf in found["leaves"].items()}
    if not bad and combine(kinds, digests) != found["state_digest"]:
        bad.append("(state digest)")
    return bad


def _words(path: epath.Path, name: str, leaf: dict[str, Any], pause: Pause) -> np.ndarray:
    """The digest of a stored leaf: uint32 [2]."""
    total = np.zeros(2, np.uint32)
    if not _size(leaf):
        return total  # a leaf without elements is not stored
    array = _open(path, name)
    shape = tuple(array.shape)
    is_key = "key_impl" in leaf  # stored as its data, with an axis of words more
    if (shape[:-1] if is_key else shape) != tuple(leaf["shape"]):
        raise ValueError(f"{name}: stored with shape {shape}, the manifest says {leaf['shape']}")
    if not is_key and array.dtype.name != leaf["dtype"]:
        raise ValueError(f"{name}: stored as {array.dtype.name}, not {leaf['dtype']}")
    chunk = array.chunk_layout.read_chunk.shape or shape
    corners = np.ndindex(*(-(-size // side) for size, side in zip(shape, chunk, strict=True)))
    for corner in corners:
        where = tuple(
            slice(i * side, min((i + 1) * side, size))
            for i, side, size in zip(corner, chunk, shape, strict=True)
        )
        block = np.asarray(array[where].read().result())
        for part in pieces(block.shape, _PIECE):
            start = [w.start + p.start for w, p in zip(where, part, strict=True)]
            total += leaf_words(block[part], start, shape)
            pause(block[part].nbytes)
    return total


def _size(leaf: dict[str, Any]) -> int:
    return int(np.prod(leaf["shape"]))


def _index_is_sound(path: epath.Path, names: list[str]) -> bool:
    """Whether Orbax's file about the arrays names the stored leaves, all in one form.

    It has no checksum, and a restore needs it. What the form is belongs to Orbax's version.
    """
    try:
        index = json.loads((path / listing.STATE_ITEM / _INDEX).read_text())
        forms = set()
        for name in names:
            entry = index["tree_metadata"].pop(str((name,)))
            (key,) = entry["key_metadata"]
            value = entry["value_metadata"]
            if key.pop("key") != name:
                return False
            forms.add((*sorted(key.items()), value["value_type"], value["skip_deserialize"]))
        flags = (index["use_ocdbt"], index["use_zarr3"])
        return flags == (True, False) and len(forms) <= 1 and not index["tree_metadata"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _open(path: epath.Path, name: str) -> Any:
    base = str(path / listing.STATE_ITEM)
    files = {"driver": "file", "path": f"{base}/"}
    return ts.open(
        {
            "driver": "zarr",
            "kvstore": {
                "driver": "ocdbt",
                "base": object_store.kvstore(base) if object_store.remote(base) else files,
                "path": f"{name}/",
            },
            "fill_missing_data_reads": False,
        },
        read=True,
        open=True,
    ).result()
