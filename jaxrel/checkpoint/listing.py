"""Which checkpoints a directory holds, read from disk without JAX."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from etils import epath

from jaxrel.checkpoint import manifest, marks, object_store
from jaxrel.checkpoint.errors import DamagedError
from jaxrel.checkpoint.local_listing import local_rows
from jaxrel.exit_codes import DataRefusedError, UsageError

STATE_ITEM = "state"
"""Name of the arrays' item, a folder inside the step's folder."""
TMP_SUFFIX = ".orbax-checkpoint-tmp"
"""Orbax writes a step under this name and renames it when it is complete."""
ASIDE_SUFFIX = ".aside"
"""A step that the run went back behind is renamed to this, so that it is never taken for new."""
SAVE_SUFFIX = ".save"
"""In an object store a step is written under this name and stays there, so that what a dead save
still writes never gets into another."""
COMMIT_FILE = "commit_success.txt"
"""Orbax writes it last: there, a folder without it is not complete."""
ASIDE_FILE = "jaxrel-aside"
"""There, a folder with it is set aside."""
_STEP = re.compile(rf"(0|[1-9][0-9]*)(?:{re.escape(SAVE_SUFFIX)}-[0-9a-f]+-[0-9]+)?")
_UNUSED = re.compile(rf"(0|[1-9][0-9]*)({re.escape(TMP_SUFFIX)}|{re.escape(ASIDE_SUFFIX)}).*")

_GOOD = ("verified", "committed")
Status = Literal["verified", "committed", "corrupt", "incomplete", "foreign", "aside"]


@dataclass(frozen=True)
class Entry:
    """One entry of a checkpoint directory that bears a step's number."""

    step: int
    path: epath.Path
    status: Status
    """`committed`: complete, and its manifest is sound. `verified`: its arrays too were read
    back. `corrupt`: complete, but damaged. `incomplete`: a save that never ended. `foreign`:
    not jaxrel's. `aside`: of a timeline that the run has left."""
    state_digest: str | None = None
    """From the manifest; 32 hex digits."""
    trusted: bool = False
    """The run went on from it for long enough without a sign of trouble."""
    metric: float | None = None
    """What was saved with it; lower is better."""
    why: str = ""
    """Why it is corrupt, or foreign although it has the parts of a checkpoint of jaxrel."""

    @property
    def good(self) -> bool:
        """Whether it can be restored, for all that is known."""
        return self.status in _GOOD

    @property
    def complete(self) -> bool:
        """Whether it is a checkpoint of this timeline that jaxrel committed, damaged or not."""
        return self.good or self.status == "corrupt"

    @property
    def useless(self) -> bool:
        """Whether it may have been a good one: no run may start as if it were not there."""
        return not self.good and bool(self.why)


def scan(directory: epath.PathLike) -> list[Entry]:
    """The entries of `directory` that bear a step's number, by rising step; [] if it is missing."""
    directory = object_store.place(directory)
    remote = object_store.remote(directory)
    try:
        paths = sorted(directory.iterdir(), key=lambda path: path.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    entries = []
    for path in paths:
        if found := _STEP.fullmatch(path.name):
            entries += _stored(int(found[1]), path) if remote else [_judge(int(found[1]), path)]
        elif (found := _UNUSED.fullmatch(path.name)) and path.is_dir():
            status = "incomplete" if found[2] == TMP_SUFFIX else "aside"
            entries.append(Entry(int(found[1]), path, status))
    return sorted(entries, key=lambda entry: entry.step)


def folder(directory: epath.Path, step: int) -> epath.Path:
    """The folder of a step, also of one that is not there."""
    plain = directory / str(step)
    if object_store.remote(directory) or not plain.exists():  # or a copy of one
        for entry in scan(directory):
            if entry.step == step and entry.complete:
                return entry.path
    return plain


def present(path: epath.Path) -> bool:
    """Whether the checkpoint in the folder `path` has not been taken away."""
    return (path / COMMIT_FILE if object_store.remote(path) else path).exists()


def newest(directory: epath.PathLike) -> int | None:
    """Step of the newest good checkpoint, None if there is no complete one of jaxrel's.

    Raises DataRefusedError where there are some and none is good: a run must not start from
    nothing as if there were none.
    """
    entries = scan(directory)
    good = [entry.step for entry in entries if entry.good]
    useless = {entry.step: entry.why for entry in entries if entry.useless}
    if useless and not good:
        raise DataRefusedError(none_good(directory, useless))
    return max(good, default=None)


def none_good(directory: epath.PathLike, reasons: dict[int, str]) -> str:
    """The message that refuses to start from nothing."""
    told = "; ".join(f"step {step}: {reasons[step]}" for step in sorted(reasons, reverse=True))
    return (
        f"none of the checkpoints in {directory} is good ({told}); to start anew, choose another"
        " directory or move them away"
    )


def list_checkpoints(directory: epath.PathLike, local: Sequence[Path] = ()) -> dict[str, Any]:
    """The document of `jaxrel checkpoint list --json`; a run's directory is made by its first save.

    `bytes` is the size of all files of the entry; `local` are the run's folders on the disks of
    its hosts, as far as they are here, and what is whole there can be restored too.
    """
    directory = object_store.place(directory)
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"checkpoint directory {directory} is not a directory")
    entries = [entry for entry in scan(directory) if entry.status != "aside"]
    rows = [
        {
            "step": entry.step,
            "tier": "durable",
            "bytes": _size(entry.path),
            "status": entry.status,
            "trusted": entry.trusted,
            "state_digest": entry.state_digest,
        }
        for entry in entries
    ]
    rows = sorted(rows + (local_rows(local)), key=lambda row: row["step"])
    good = (row["step"] for row in rows if row["status"] in _GOOD)
    return {"latest_restorable": max(good, default=None), "checkpoints": rows}


def _stored(step: int, path: epath.Path) -> list[Entry]:
    """The entry at `path` in an object store; none where a server lists what has gone."""
    names = {child.name for child in path.iterdir()}
    if COMMIT_FILE not in names:
        return [Entry(step, path, "incomplete")] if object_store.objects(path) else []
    return [Entry(step, path, "aside") if ASIDE_FILE in names else _judge(step, path)]


def _judge(step: int, path: epath.Path) -> Entry:
    """An entry that is complete."""
    try:
        found = manifest.read(path)
    except DamagedError as error:
        return Entry(step, path, "corrupt", why=str(error))
    except DataRefusedError as error:  # of a newer version, whose restore says so
        return Entry(step, path, "committed", why=str(error))
    except manifest.NotOursError:
        # Another program's, or ours with another file in the manifest's place.
        mixed = (path / STATE_ITEM).is_dir()
        return Entry(step, path, "foreign", why="its manifest is not jaxrel's" if mixed else "")
    except (FileNotFoundError, NotADirectoryError):
        return _without_manifest(step, path)
    known = marks.read(path, found["state_digest"])
    status: Status = "verified" if known.verified else "committed"
    return Entry(
        step,
        path,
        status if known.corrupt is None else "corrupt",
        found["state_digest"],
        known.trusted and known.corrupt is None,
        found.get("metric"),
        known.corrupt or "",
    )


def _without_manifest(step: int, path: epath.Path) -> Entry:
    names = {child.name for child in path.iterdir()} if path.is_dir() else {"a file"}
    if not names:
        return Entry(step, path, "incomplete")
    if {manifest.ITEM, STATE_ITEM} <= names:
        return Entry(step, path, "corrupt", why="its manifest is gone")
    return Entry(step, path, "foreign")


def _size(path: epath.Path) -> int:
    """Bytes of all files below `path`; a file that vanishes meanwhile counts as none."""
    if object_store.remote(path):
        return sum(object_store.objects(path).values())
    try:
        if not path.is_dir():
            return path.stat().length
        return sum(_size(child) for child in path.iterdir())
    except FileNotFoundError:
        return 0
