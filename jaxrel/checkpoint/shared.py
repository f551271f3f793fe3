"""Whether all processes of a job see the same directory."""

import secrets
import time

import jax
from etils import epath

from jaxrel.checkpoint import object_store
from jaxrel.checkpoint.together import agreed, from_everyone, together
from jaxrel.exit_codes import FailedError, UsageError

_WAIT_S = 5.0
"""For a network file system to show what another host has just written."""


def check_shared(directory: epath.PathLike) -> None:
    """Raise UsageError, naming processes, where they see another directory than process 0.

    Collective; makes the directory. Without it a save of shards that lie on different disks is
    noticed when it is restored, or by a barrier that never opens.
    """
    if jax.process_count() == 1:
        return
    directory = object_store.place(directory)
    path = directory / f".jaxrel-probe-{agreed(lambda: secrets.token_hex(8))}"
    together(lambda: _write(path))
    seen = from_everyone(_appears(path))
    together(lambda: path.unlink() if jax.process_index() == 0 else None)
    blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise UsageError(
            f"checkpoint.dir: got {str(directory)!r}: processes {', '.join(blind)} do not see what"
            " process 0 wrote there; expected a directory that all hosts share"
        )


def _write(path: epath.Path) -> None:
    if jax.process_index() == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        except OSError as error:
            raise FailedError(f"{path.parent} cannot be written: {error}") from error


def _appears(path: epath.Path) -> bool:
    until = time.monotonic() + _WAIT_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
