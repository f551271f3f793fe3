"""What was found out about a checkpoint after its commit: a small file in its folder.

    {"state_digest": "...", "verified": true, "trusted": false, "corrupt": null, "checksum": "..."}

It speaks of one state digest, so that it is never taken for a judgement on another
checkpoint of the same step; one that is damaged says nothing.
"""

import json
import os
import threading
from dataclasses import asdict, dataclass, replace
from typing import Any

from etils import epath

from jaxrel.checkpoint import manifest

FILE = "jaxrel-marks.json"


@dataclass(frozen=True)
class Marks:
    """Nothing is known of a checkpoint that is only committed."""

    verified: bool = False
    """It was read back, or restored, and every digest was right."""
    trusted: bool = False
    """And the run went on from it for long enough without a sign of trouble."""
    corrupt: str | None = None
    """Why it must not be used."""


def read(path: epath.Path, state_digest: str) -> Marks:
    """The marks of the checkpoint at `path`, a step's folder, whose digest that is."""
    try:
        found = json.loads((path / FILE).read_text())
        if found != manifest.seal({k: v for k, v in found.items() if k != "checksum"}):
            return Marks()
        if found.pop("state_digest") != state_digest:
            return Marks()
        return Marks(found["verified"], found["trusted"], found["corrupt"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return Marks()


def add(path: epath.Path, state_digest: str, **marks: Any) -> None:
    """Set some marks, as `verified=True`. Raises OSError where that cannot be written."""
    now = replace(read(path, state_digest), **marks)
    text = json.dumps(manifest.seal({"state_digest": state_digest, **asdict(now)}))
    part = path / f"{FILE}.{os.getpid()}-{threading.get_ident()}"
    part.write_text(text)
    part.replace(path / FILE)
