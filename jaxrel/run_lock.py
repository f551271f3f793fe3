"""One job at a time in a run directory."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from jaxrel.exit_codes import UsageError

_held: list[int] = []
"""Open until the process ends, and the lock with them: however it ends, the kernel lets go."""


def claim(run_dir: str | Path) -> None:
    """Hold `run_dir` for the life of this process; for process 0 of a job.

    Raises UsageError when another process holds it, or when it cannot be written. A file
    system without locks is not guarded.
    """
    path = Path(run_dir, ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        where = f"run.dir: got {str(run_dir)!r}"
        raise UsageError(f"{where}: cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise UsageError(
            f"run.dir: got {str(run_dir)!r}: process {holder or 'unknown'} is training there;"
            " wait for it, or choose another run.dir"
        ) from None
    except OSError:
        os.close(descriptor)
        return
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    _held.append(descriptor)


@contextlib.contextmanager
def supervised(run_dir: str | Path) -> Iterator[None]:
    """Be the only leader of `run_dir` while the block runs; nothing is written into it.

    Raises UsageError when another leader is there, or when it cannot be made.
    """
    path = Path(run_dir)
    where = f"--dir: got {str(run_dir)!r}"
    try:
        made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{where}: cannot be written: {error.strerror}") from None
    try:
        with contextlib.suppress(OSError):  # a file system without locks is not guarded
            _lock(descriptor, where)
        yield
    finally:
        os.close(descriptor)
        if made:
            with contextlib.suppress(OSError):  # something was recorded
                path.rmdir()


def _lock(descriptor: int, where: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{where}: another launch is supervising a job there; wait for it, or choose another"
            " directory"
        ) from None
