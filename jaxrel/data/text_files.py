"""Finding the text files below some folders, in an order that no machine changes."""

import errno
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from jaxrel.exit_codes import DataRefusedError, UsageError


@dataclass(frozen=True)
class TextFile:
    """One file of UTF-8 text without NUL bytes, as it was when it was found."""

    path: Path
    digest: bytes
    """BLAKE2b of the content, 16 bytes."""

    def read(self) -> bytes:
        """The content; DataRefusedError if it is no longer what was found."""
        content = _read(self.path)
        if _digest(content) != self.digest:
            raise DataRefusedError(f"{self.path}: changed while the corpus was being built")
        return content


def find(
    sources: Sequence[str | Path],
    *,
    exclude: Path | None = None,
    keep: Callable[[Path], bool] = lambda relative: True,
) -> tuple[list[TextFile], dict[str, int]]:
    """The text files of `sources` (files, or folders with all that is below), and what was skipped.

    Sources stay in the order given; below a folder come its files, then its subfolders, each
    sorted by name. Symbolic links are followed, and what was already seen by another path is
    skipped, so loops end. The folder
    `exclude`, and paths below a source whose relative path `keep` refuses, are left out
    without being counted. The second value counts skipped files by reason: hidden, dangling
    link, not a file, seen before, empty, binary (a NUL byte), not UTF-8.

    Raises UsageError when a source does not exist, DataRefusedError when something cannot be
    read: a corpus that silently lacks a file is not the corpus that was asked for.
    """
    if not sources:
        raise UsageError("no source given: name at least one folder or file of text")
    found: list[TextFile] = []
    skipped: Counter[str] = Counter()
    seen = {os.path.realpath(exclude)} if exclude else set()
    for source in map(Path, sources):
        if not os.path.exists(source):
            raise UsageError(f"no such source: {source}")
        below = _walk(source, seen, skipped) if os.path.isdir(source) else iter([source])
        for path in below:
            if path != source and not keep(path.relative_to(source)):
                continue
            content = _content(path, seen)
            if isinstance(content, bytes):
                found.append(TextFile(path, _digest(content)))
            else:
                skipped[content] += 1
    return found, {reason: n for reason, n in sorted(skipped.items()) if n}


def _walk(top: Path, seen: set[str], skipped: Counter[str]) -> Iterator[Path]:
    for folder, folders, files in os.walk(
        top, followlinks=True, onerror=lambda error: _refuse(error.filename, error)
    ):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        skipped["hidden"] += sum(name.startswith(".") for name in folders + files)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _content(path: Path, seen: set[str]) -> bytes | str:
    """The file's text, or the reason why it is not text."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return "dangling link"
        _refuse(path, error)
    if not stat.S_ISREG(mode):  # reading a pipe would wait for ever
        return "not a file"
    real = os.path.realpath(path)
    if real in seen:
        return "seen before"
    seen.add(real)
    content = _read(path)
    if not content:
        return "empty"
    if b"\0" in content:
        return "binary"
    try:
        content.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        _refuse(path, error)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _refuse(path: str | Path, error: OSError) -> NoReturn:
    raise DataRefusedError(f"cannot read {path}: {error.strerror}") from error
