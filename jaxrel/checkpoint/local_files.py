"""The files of a local tier: of each step, what the processes of one host hold. No JAX.

    DIR/STEP.RANK.npz    member `manifest`: the checkpoint's manifest, as JSON
                         member `pieces`: [[path, start, stop], ...] of the whole state, as JSON
                         member N: the bytes of the Nth piece, for those that this file holds

A piece is the block `start` to `stop` of a stored leaf. A file is complete when it bears its
name, and every member has the checksum of the zip format; the steps of a whole state need the
files of several processes, and may be complete though a host is gone.
"""

import contextlib
import glob
import io
import itertools
import json
import logging
import os
import re
import secrets
import socket
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from jaxrel.checkpoint import manifest

log = logging.getLogger(__name__)

NAME_FILE = "local-name"
"""In a run directory: the name of the run's folder on the disks of its hosts, and the inode of the
directory that it was drawn for."""
_NAMED = re.compile(r"([0-9a-f]{16}) (\d+)\n")
_PART, _NPY = ".part", ".npy"
_NAME = re.compile(rf"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.npz({re.escape(_PART)})?")


class Piece(NamedTuple):
    """A block of a stored leaf."""

    path: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the block."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True)
class LocalFile:
    """A complete file, as its own members describe it."""

    file: Path
    step: int
    manifest: dict[str, Any]
    pieces: list[Piece]
    """Of the whole state; all files of one save agree on it."""
    held: frozenset[int]
    """Numbers of the pieces in this file."""

    @property
    def save(self) -> str:
        """The same for the files of one save, and for no others."""
        return f"{self.step} {self.manifest['checksum']} {len(self.pieces)}"


def write(
    file: Path, described: Mapping[str, Any], pieces: Iterable[Piece], held: Mapping[int, Any]
) -> None:
    """Write one file, in one stroke. Raises OSError."""
    members = {str(number): _bytes(block) for number, block in held.items()}
    members["manifest"] = _text(described)
    members["pieces"] = _text(list(pieces))
    part = file.with_name(f"{file.name}{_PART}")
    try:
        with part.open("wb") as opened:
            np.savez(opened, allow_pickle=False, **members)
            opened.flush()
            os.fsync(opened.fileno())
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def run_folder(local_dir: str, name: str) -> Path:
    """Where the run of that name keeps its files below `local_dir`, on this host.

    `{host}` in it stands for the host's name, as `jaxrel launch` gives it.
    """
    host = os.environ.get("JAXREL_HOST", socket.gethostname())
    return Path(local_dir.replace("{host}", host)).expanduser() / name


def run_folders(local_dir: str, name: str) -> list[Path]:
    """Where this machine has files of that run: of several hosts where it simulates them."""
    anywhere = Path("*".join(map(glob.escape, local_dir.split("{host}")))).expanduser()
    return sorted(Path(found) for found in glob.glob(str(anywhere / name)))


def run_name(run_dir: str | os.PathLike[str]) -> str:
    """The name of a run on its hosts' disks, drawn anew for a run that is new. Raises OSError.

    So a run that begins again in the same directory, or in a copy of it, never takes the files
    of another. What is in the file and is no such name counts as nothing.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        found = _NAMED.fullmatch(Path(run_dir, NAME_FILE).read_text())
        if found and int(found[2]) == Path(run_dir).stat().st_ino:
            return found[1]
    return secrets.token_hex(8)


def keep_name(run_dir: str | os.PathLike[str], name: str) -> None:
    """Write the name down, in one stroke, before any file bears it. Raises OSError."""
    part = Path(run_dir, f"{NAME_FILE}{_PART}")
    part.write_text(f"{name} {Path(run_dir).stat().st_ino}\n")
    part.replace(Path(run_dir, NAME_FILE))


def scan(*directories: Path) -> list[LocalFile]:
    """The complete files in the directories; what is damaged at sight is not among them."""
    found = []
    for file, step in itertools.chain(*map(_named, directories)):
        if file.name.endswith(_PART):
            continue
        try:
            found.append(_opened(file, step))
        except Exception as error:  # whatever damage makes of a zip file
            log.warning("%s is damaged, and as good as not there: %s", file, error)
    return found


def whole_steps(files: Iterable[LocalFile]) -> dict[str, tuple[LocalFile, bool]]:
    """By save: one of its files, and whether these files hold all of its pieces."""
    saves: dict[str, list[LocalFile]] = defaultdict(list)
    for file in files:
        saves[file.save].append(file)
    return {
        save: (some[0], len(frozenset().union(*(f.held for f in some))) == len(some[0].pieces))
        for save, some in saves.items()
    }


class Blocks:
    """The pieces in some files of one save; opens each file once."""

    def __init__(self, files: Sequence[LocalFile]) -> None:
        self._opened = contextlib.ExitStack()
        self._members: dict[int, list[Any]] = {}
        for file in files:
            with contextlib.suppress(Exception):  # then it holds nothing
                members = self._opened.enter_context(zipfile.ZipFile(file.file))
                for number in file.held:
                    self._members.setdefault(number, []).append(members)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def read(self, number: int, size: int) -> np.ndarray | None:
        """The `size` bytes of a piece, from the first file that gives them undamaged, or None."""
        for members in self._members.get(number, []):
            with contextlib.suppress(Exception):
                data = _member(members, str(number))
                if len(data) == size:
                    return data
        return None


def delete(directory: Path, *, before: int | None = None, after: int | None = None) -> None:
    """Delete the files, finished or not, of steps below `before` and above `after`.

    Raises OSError.
    """
    for file, step in _named(directory):
        if (before is not None and step < before) or (after is not None and step > after):
            file.unlink(missing_ok=True)


def last_but_one(directory: Path, rank: int) -> int:
    """The step of the newest but one file of `rank`; -1 where there are not two."""
    mine = sorted(step for file, step in _named(directory) if file.name == f"{step}.{rank}.npz")
    return mine[-2] if len(mine) > 1 else -1


def _named(directory: Path) -> list[tuple[Path, int]]:
    found = [(file, _NAME.fullmatch(file.name)) for file in directory.glob("*.npz*")]
    return sorted((file, int(name[1])) for file, name in found if name and file.is_file())


def _opened(file: Path, step: int) -> LocalFile:
    with zipfile.ZipFile(file) as members:
        text = _parsed(_member(members, "manifest"))
        described = manifest.checked(text, str(file), str(step))
        listed = _parsed(_member(members, "pieces"))
        pieces = [Piece(p, tuple(a), tuple(b)) for p, a, b in listed]
        names = (name.removesuffix(_NPY) for name in members.namelist())
        held = frozenset(
            int(name) for name in names if name.isdecimal() and int(name) < len(pieces)
        )
    return LocalFile(file, step, described, pieces, held)


def _member(members: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array whose bytes, its header's too, have the checksum that the zip file has of them."""
    return np.load(io.BytesIO(members.read(f"{name}{_NPY}")), allow_pickle=False)


def _bytes(block: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)


def _text(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _parsed(text: np.ndarray) -> Any:
    return json.loads(text.tobytes())
