"""Whether two runs came to the same: every loss on the way, every leaf at the end."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etils import epath

from jaxrel.checkpoint import manifest
from jaxrel.events import StepCompleted
from jaxrel.ledger.lineage import Lineage, current
from jaxrel.ledger.reader import read


@dataclass(frozen=True)
class Outcome:
    """What a finished run is judged by."""

    losses: dict[int, float]
    """By step, of the lineage that counts."""
    state_digest: str
    leaves: dict[str, str]
    """Digest of every leaf of the last checkpoint."""


def outcome(run: Path, steps: int) -> Outcome:
    """What a finished run of `steps` is judged by.

    Raises FileNotFoundError or DamagedError when its last checkpoint is not there, or not sound.
    """
    records = read(run).records
    lineage, losses = Lineage(records), {}
    for place in current(records):
        event = records[place].event
        if not isinstance(event, StepCompleted):
            continue
        if lineage.keeps(place, records[place].attempt, event.step):
            losses[event.step] = math.nan if event.loss is None else event.loss
    last = manifest.read(epath.Path(run) / "checkpoints" / str(steps))
    leaves = {name: leaf["digest"] for name, leaf in last["leaves"].items()}
    return Outcome(losses, last["state_digest"], leaves)


def first_difference(
    one: Outcome, other: Outcome, steps: int, tolerance: float | None
) -> dict[str, Any] | None:
    """The first step whose loss differs, and the first leaf at the end; None if there is neither.

    `step` is the last one when all losses agree; `leaf` is None when no digest of a leaf differs,
    or when a `tolerance` says that digests do.
    """
    step = next(
        (s for s in range(1, steps + 1) if not _agree(one.losses, other.losses, s, tolerance)), None
    )
    if tolerance is not None:
        return None if step is None else {"step": step, "leaf": None}
    names = [*one.leaves, *(name for name in other.leaves if name not in one.leaves)]
    leaf = next((n for n in names if one.leaves.get(n) != other.leaves.get(n)), None)
    if (step, leaf) == (None, None) and one.state_digest == other.state_digest:
        return None
    return {"step": steps if step is None else step, "leaf": leaf}


def _agree(
    one: dict[int, float], other: dict[int, float], step: int, tolerance: float | None
) -> bool:
    if step not in one or step not in other:
        return False
    a, b = one[step], other[step]
    return a == b or math.isclose(a, b, rel_tol=tolerance or 0.0)
