"""`jaxrel checkpoint verify`: every digest of every checkpoint, without JAX."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils import epath

from jaxrel.checkpoint import listing, marks
from jaxrel.checkpoint.local_listing import local_verified
from jaxrel.checkpoint.readback import bad_leaves
from jaxrel.exit_codes import DataRefusedError


def verify(
    directory: epath.PathLike, step: int | None = None, local: Sequence[Path] = ()
) -> dict[str, Any]:
    """The document of `jaxrel checkpoint verify --json`, of one step or of all complete ones.

    `bad_leaves` of one whose manifest is damaged is `["(manifest)"]`. What was found is marked
    where that can be written. `local` are the run's folders on its hosts' disks. Raises
    DataRefusedError where there is nothing to verify.
    """
    entries = [
        e for e in listing.scan(directory) if e.complete and (step is None or e.step == step)
    ]
    local_ones = local_verified(local, step)
    if not entries and not local_ones:
        which = "" if step is None else f" of step {step}"
        raise DataRefusedError(f"no complete checkpoint{which} in {directory}")
    rows = []
    for entry in entries:
        bad = ["(manifest)"] if entry.state_digest is None else bad_leaves(entry.path)
        if entry.state_digest is not None:
            found = {"verified": not bad, "corrupt": f"damaged: {', '.join(bad)}" if bad else None}
            with contextlib.suppress(OSError):
                marks.add(entry.path, entry.state_digest, **found)
        rows.append({"step": entry.step, "tier": "durable", "ok": not bad, "bad_leaves": bad})
    rows = sorted(rows + local_ones, key=lambda row: row["step"])
    return {"ok": all(row["ok"] for row in rows), "checkpoints": rows}
