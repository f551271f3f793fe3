"""Building a corpus from text, and the one that is always there: Python's own library.

The split is by file, so that no text is on both sides of a window: a file is held out when
the hash of its content falls below `held_out`. That depends on nothing else, so equal files
land together and another order or machine changes nothing. Where this leaves a side without
files (few files), the file with the nearest hash is moved to it.

A byte corpus holds the bytes of each file followed by byte 0, which no text contains.
"""

import errno
import filecmp
import os
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxrel.data import tokenizer as tokenizers
from jaxrel.data.store import (
    CHUNK,
    SPLITS,
    VERSION,
    Corpus,
    SplitWriter,
    is_corpus,
    token_dtype,
)
from jaxrel.data.text_files import TextFile, find
from jaxrel.exit_codes import DataRefusedError, FailedError, UsageError


@dataclass(frozen=True)
class CorpusInfo:
    """What `build` made or found."""

    path: Path
    created: bool
    """False when the same corpus was there already."""
    corpus: Corpus
    skipped: dict[str, int]
    """Files left out, by reason."""


def build(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str = "bytes",
    held_out: float = 0.05,
) -> CorpusInfo:
    """Make the corpus `out` from the text in `sources`, folders or files.

    `held_out` is the share of files kept for evaluation, in [0, 1); 0 keeps none. The corpus
    is written beside `out` and renamed, so that `out` is whole or absent.

    Raises UsageError (64): a source that does not exist; an unknown tokenizer; `held_out` out
    of range; `out` without a parent, or a file, or a folder with anything but this very
    corpus. DataRefusedError (65): no text, a file that cannot be read, too few files to
    split. FailedError (70): the disk is full.
    """
    out = Path(os.path.realpath(out))
    if not 0 <= held_out < 1:
        raise UsageError(f"held_out is {held_out}: expected a share of the files in [0, 1)")
    chosen = tokenizers.load(tokenizer)
    _check_out(out)
    files, skipped = find(sources, exclude=out)
    if not files:
        reasons = ", ".join(f"{n} {reason}" for reason, n in skipped.items()) or "no files"
        raise DataRefusedError(f"no text in {', '.join(map(str, sources))}: {reasons}")
    created, corpus = _write_beside(out, _split_by_content(files, held_out), chosen)
    return CorpusInfo(out, created, corpus, skipped)


def standard_library_corpus(cache_dir: str | Path | None = None) -> Path:
    """The corpus of this Python's own standard library, built on first use (a few seconds).

    It lies in `cache_dir`, by default jaxrel's folder in the user's cache, once for each
    version of Python and of the format. Tests, idlelib and installed packages are left out,
    as is what a build writes about its own machine. Builds of one Python version may still
    differ in a few files; the content hash in the fingerprint then refuses a resume.

    Raises UsageError when the cache cannot be written, DataRefusedError when this Python
    comes without its source.
    """
    cache = Path(cache_dir) if cache_dir else _user_cache()
    name = f"{sys.implementation.name}-{platform.python_version()}-bytes-v{VERSION}"
    out = Path(os.path.realpath(cache)) / name
    if is_corpus(out):
        return out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write the cache {out.parent} ({error.strerror}): set XDG_CACHE_HOME, or "
            "data.corpus"
        ) from error
    library = Path(sysconfig.get_path("stdlib"))
    files, _ = find([library], keep=_in_standard_library) if library.is_dir() else ([], {})
    if not files:
        raise DataRefusedError(
            f"this Python has no library source in {library}: build a corpus with "
            "`jaxrel data build` and set data.corpus"
        )
    # Another process may be building the same; whoever renames first wins, both are equal.
    _write_beside(out, _split_by_content(files, 0.05), tokenizers.load("bytes"))
    return out


def _check_out(out: Path) -> None:
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} does not exist: create it, or give another --out")
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"{out} is a file: --out names the folder to make")
    if not is_corpus(out) and any(out.iterdir()):
        raise UsageError(f"{out} is not empty and not a corpus: give another --out")


def _split_by_content(files: list[TextFile], held_out: float) -> dict[str, list[TextFile]]:
    """Which files go where; see the text at the top of this module."""
    digests = sorted({file.digest for file in files})
    if held_out and len(digests) < 2:
        raise DataRefusedError(
            f"{files[0].path} is the only text: two different files are needed to hold one out "
            "(--held-out 0 holds none out)"
        )
    cut = sum(int.from_bytes(digest[:8]) < held_out * 2**64 for digest in digests)
    if held_out:
        cut = min(max(cut, 1), len(digests) - 1)
    held = set(digests[:cut])
    return {
        "train": [file for file in files if file.digest not in held],
        "held_out": [file for file in files if file.digest in held],
    }


def _write_beside(
    out: Path, splits: dict[str, list[TextFile]], tokenizer: tokenizers.Tokenizer
) -> tuple[bool, Corpus]:
    """Write the corpus into a temporary sibling and rename it; False when `out` equals it."""
    try:
        with tempfile.TemporaryDirectory(
            dir=out.parent, prefix=f".{out.name}.", suffix=".building"
        ) as temporary:
            built = Path(temporary) / "corpus"
            built.mkdir()  # the temporary folder itself is closed to other users
            corpus = _write(built, splits, tokenizer)
            created = _rename(built, out)
            if not created and not _equal(built, out):
                raise UsageError(f"{out} already holds another corpus: give another --out")
            return created, corpus
    except OSError as error:
        denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        kind = UsageError if denied else FailedError
        raise kind(f"cannot write {out}: {error.strerror}") from error


def _write(
    folder: Path, splits: dict[str, list[TextFile]], tokenizer: tokenizers.Tokenizer
) -> Corpus:
    written = {}
    for name in SPLITS:
        writer = SplitWriter(folder / f"{name}.array_record", tokenizer.vocabulary)
        for file in splits[name]:
            writer.add(tokenizer.encode(file.read()), tokenizer.separator)
        written[name] = writer.close()
    corpus = Corpus(
        tokenizer=tokenizer.name,
        vocabulary=tokenizer.vocabulary,
        separator=tokenizer.separator,
        dtype=token_dtype(tokenizer.vocabulary).name,
        chunk=CHUNK,
        splits=written,
    )
    corpus.write(folder)
    return corpus


def _rename(built: Path, out: Path) -> bool:
    try:
        os.rename(built, out)  # replaces an empty folder, never one that holds anything
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _equal(built: Path, out: Path) -> bool:
    names = [path.name for path in built.iterdir()]
    same, _, _ = filecmp.cmpfiles(built, out, names, shallow=False)
    return len(same) == len(names)


def _in_standard_library(path: Path) -> bool:
    return (
        path.suffix == ".py"
        and not _LEFT_OUT & set(path.parts)
        and not path.parts[0].startswith("config-")
        and not path.name.startswith("_sysconfigdata")
    )


_LEFT_OUT = {
    *("test", "tests", "idlelib", "site-packages", "dist-packages"),
    *("sitecustomize.py", "usercustomize.py"),
}


def _user_cache() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "jaxrel"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrel"
