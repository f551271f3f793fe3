"""What this machine holds of a run's local checkpoints: listed, and proven. No JAX."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (names bfloat16 and its kin to NumPy)
import numpy as np

from jaxrel.checkpoint.local_files import Blocks, LocalFile, scan, whole_steps
from jaxrel.digest_host import as_hex, combine, kind, leaf_words


def local_rows(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Rows as of `listing.list_checkpoints`, tier `local`, by rising step.

    `committed`: what lies in `folders` is all of it. `incomplete`: it is a part, and other hosts
    may have the rest.
    """
    files = scan(*folders)
    return [
        {
            "step": one.step,
            "tier": "local",
            "bytes": sum(f.file.stat().st_size for f in files if f.save == save),
            "status": "committed" if whole else "incomplete",
            "trusted": False,
            "state_digest": one.manifest["state_digest"],
        }
        for save, (one, whole) in sorted(whole_steps(files).items(), key=lambda kv: kv[1][0].step)
    ]


def local_verified(folders: Sequence[Path], step: int | None = None) -> list[dict[str, Any]]:
    """Rows as of `verify.verify`, of the steps of which all is in `folders`."""
    files = scan(*folders)
    rows = []
    for save, (one, whole) in sorted(whole_steps(files).items(), key=lambda kv: kv[1][0].step):
        if whole and step in (None, one.step):
            bad = _bad_leaves([f for f in files if f.save == save])
            rows.append({"step": one.step, "tier": "local", "ok": not bad, "bad_leaves": bad})
    return rows


def _bad_leaves(files: list[LocalFile]) -> list[str]:
    """Leaves that these files do not hold as they were saved; reads a piece at a time."""
    pieces, described = files[0].pieces, files[0].manifest
    shapes: dict[str, list[int]] = {}
    for piece in pieces:
        so_far = shapes.setdefault(piece.path, [0] * len(piece.stop))
        shapes[piece.path] = [max(a, b) for a, b in zip(so_far, piece.stop, strict=True)]
    words = {path: np.zeros(2, np.uint32) for path in described["leaves"]}
    bad = set()
    with Blocks(files) as blocks:
        for number, piece in enumerate(pieces):
            leaf = described["leaves"][piece.path]
            dtype = np.dtype("uint32" if "key_impl" in leaf else leaf["dtype"])
            block = blocks.read(number, math.prod(piece.shape) * dtype.itemsize)
            if block is None:
                bad.add(piece.path)
                continue
            block = block.view(dtype).reshape(piece.shape)
            words[piece.path] += leaf_words(block, piece.start, shapes[piece.path])
    digests = {path: as_hex(total) for path, total in words.items()}
    leaves = described["leaves"]
    bad |= {path for path, digest in digests.items() if digest != leaves[path]["digest"]}
    kinds = {path: kind(leaf["dtype"], leaf["shape"]) for path, leaf in leaves.items()}
    if not bad and combine(kinds, digests) != described["state_digest"]:
        return ["(state digest)"]
    return sorted(bad)
