"""Which checkpoints a directory holds, read from disk without JAX."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from etils import epath

from jaxrel.checkpoint import manifest
from jaxrel.exit_codes import DataRefusedError, UsageError

STATE_ITEM = "state"
"""Name of the arrays' item, a folder inside the step's folder."""
TMP_SUFFIX = ".orbax-checkpoint-tmp"
"""Orbax writes a step under this name and renames it when it is complete."""
_STEP = re.compile(r"0|[1-9][0-9]*")
_TMP = re.compile(rf"(0|[1-9][0-9]*){re.escape(TMP_SUFFIX)}.*")

Status = Literal["committed", "corrupt", "incomplete", "foreign"]


@dataclass(frozen=True)
class Entry:
    """One entry of a checkpoint directory that bears a step's number."""

    step: int
    path: epath.Path
    status: Status
    """`committed`: complete, and its manifest is sound. `corrupt`: complete, and its manifest
    is damaged or gone. `incomplete`: a save that never ended. `foreign`: not jaxrel's."""
    state_digest: str | None
    """From the manifest; 32 hex digits."""


def scan(directory: epath.PathLike) -> list[Entry]:
    """The entries of `directory` that bear a step's number, by rising step; [] if it is missing."""
    directory = epath.Path(directory)
    try:
        paths = sorted(directory.iterdir(), key=lambda path: path.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    entries = []
    for path in paths:
        if _STEP.fullmatch(path.name):
            status, state_digest = _judge(path)
            entries.append(Entry(int(path.name), path, status, state_digest))
        elif (tmp := _TMP.fullmatch(path.name)) and path.is_dir():
            entries.append(Entry(int(tmp[1]), path, "incomplete", None))
    return sorted(entries, key=lambda entry: entry.step)


def newest(directory: epath.PathLike) -> int | None:
    """Step of the newest complete checkpoint of jaxrel, None if there is none.

    One with a damaged manifest counts: a restore has to refuse it by name, and not start
    from nothing as if there were no checkpoint.
    """
    complete = [e.step for e in scan(directory) if e.status in ("committed", "corrupt")]
    return max(complete, default=None)


def list_checkpoints(directory: epath.PathLike) -> dict[str, Any]:
    """The document of `jaxrel checkpoint list --json`; a run's directory is made by its first save.

    `bytes` is the size of all files of the entry; `trusted` is null until it is judged.
    """
    directory = epath.Path(directory)
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"checkpoint directory {directory} is not a directory")
    entries = scan(directory)
    committed = [entry.step for entry in entries if entry.status == "committed"]
    return {
        "latest_restorable": max(committed, default=None),
        "checkpoints": [
            {
                "step": entry.step,
                "tier": "run",
                "bytes": _size(entry.path),
                "status": entry.status,
                "trusted": None,
                "state_digest": entry.state_digest,
            }
            for entry in entries
        ],
    }


def _judge(path: epath.Path) -> tuple[Status, str | None]:
    """Status and state digest of an entry whose name says that it is complete."""
    try:
        return "committed", manifest.read(path)["state_digest"]
    except DataRefusedError:
        return "corrupt", None
    except manifest.NotOursError:
        return "foreign", None
    except (FileNotFoundError, NotADirectoryError):
        pass
    if not path.is_dir():
        return "foreign", None
    names = {child.name for child in path.iterdir()}
    if not names:
        return "incomplete", None
    return ("corrupt" if {manifest.ITEM, STATE_ITEM} <= names else "foreign"), None


def _size(path: epath.Path) -> int:
    """Bytes of all files below `path`; a file that vanishes meanwhile counts as none."""
    try:
        if not path.is_dir():
            return path.stat().length
        return sum(_size(child) for child in path.iterdir())
    except FileNotFoundError:
        return 0
