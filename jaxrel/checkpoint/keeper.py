"""What becomes of checkpoints after their commit: read back, judged, set aside, deleted.

Process 0's part of a `Checkpointer`. Nothing here stops a run: a failure is logged, for the
checkpoints that count are safe.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import jax
from etils import epath

from jaxrel.checkpoint import listing, marks, object_store
from jaxrel.checkpoint.errors import SaveFailedError, may_pass, some
from jaxrel.checkpoint.readback import bad_leaves
from jaxrel.checkpoint.retention import Retention
from jaxrel.exit_codes import DataRefusedError, JaxrelError

_SETTLING_S = 30.0
"""Longest that the end of a run waits, twice at most, for checkpoints to be read back."""
_LOOK_S = 0.2

log = logging.getLogger(__name__)


class _GivenUpError(Exception):
    """The checkpointer is closed."""


class Keeper:
    """Keeps one checkpoint directory; all but `healthy` and `refused` is process 0's."""

    def __init__(
        self, directory: epath.Path, retention: Retention, verify_mb_s: float, trust_after: int
    ) -> None:
        self.directory = directory
        self.healthy = -1
        """Newest step without a sign of trouble."""
        self._retention = retention
        self._bytes_per_s = verify_mb_s * 1e6
        self._trust_after = trust_after
        self._refused: deque[tuple[int, str]] = deque()  # its reader is another thread
        self._reading: threading.Thread | None = None
        self._give_up, self._hurry = threading.Event(), threading.Event()

    def landed(self) -> None:
        """A checkpoint is complete: others may go, and it is read back."""
        self._retain(self._trust(listing.scan(self.directory)))
        self._read_back()

    def settle(self) -> None:
        """Let the reading come to its end, at full speed, if that is near; then judge anew."""
        if self._reading is None:
            return
        self._hurry.set()
        self._reading.join(_SETTLING_S)
        self._read_back()  # what landed just before it ended
        self._reading.join(_SETTLING_S)
        self._hurry.clear()
        self._trust(listing.scan(self.directory))

    def refused(self) -> list[tuple[int, str]]:
        """Step and reason of what was found damaged since this was called last."""
        return [self._refused.popleft() for _ in range(len(self._refused))]

    def close(self) -> None:
        """Stop the reading."""
        self._give_up.set()
        if self._reading is not None:
            self._reading.join(1.0)

    def mark(self, step: int, **found: object) -> None:
        """Put on disk what was found out about a step."""
        for entry in listing.scan(self.directory):
            if entry.step == step and entry.complete:
                _mark(entry, **found)

    def make_room(self, step: int, line: int | None) -> None:
        """Refuse a step that cannot be saved, clear away what is in its way.

        Here and not at the start, so that a reader of a directory in which a run is saving never
        takes its save away. `line` is the newest step of this timeline, None if the directory
        says. Raises DataRefusedError and FailedError.
        """
        if jax.process_index() != 0:
            return
        refusal = f"step {step} cannot be saved"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            entries = listing.scan(self.directory)
            complete = [e for e in entries if e.complete]
            newest = max((e.step for e in complete), default=-1) if line is None else line
            if step <= newest:
                raise DataRefusedError(f"{refusal}: {self.directory} already holds step {newest}")
            left = [e for e in complete if e.step > newest]
            path = self.directory / str(step)
            if path.exists() and step not in {e.step for e in left}:
                raise DataRefusedError(
                    f"{refusal}: {path} is in its place and is not a checkpoint of jaxrel; move it"
                    " away"
                )
            self._set_aside(left)
            for entry in entries:
                name, unfinished = entry.path.name, entry.status == "incomplete"
                if listing.TMP_SUFFIX in name or (unfinished and listing.SAVE_SUFFIX in name):
                    delete(entry.path)  # of a save that never ended
        except OSError as error:
            told = f"cannot begin: {error}"
            raise SaveFailedError(step, told, may_pass=may_pass(told)) from error

    def _set_aside(self, entries: Sequence[listing.Entry]) -> None:
        """Take steps of another timeline out of the way. Raises OSError."""
        for entry in entries:
            name = f"{entry.path.name}{listing.ASIDE_SUFFIX}-{secrets.token_hex(4)}"
            if object_store.remote(entry.path):
                (entry.path / listing.ASIDE_FILE).write_text("")
                name = entry.path.name
            else:
                entry.path.rename(entry.path.with_name(name))
            log.warning("step %d of a timeline that was left is set aside as %s", entry.step, name)

    def _read_back(self) -> None:
        idle = self._reading is None or not self._reading.is_alive()
        if idle and self._bytes_per_s and not self._give_up.is_set():
            self._reading = threading.Thread(target=self._verify, name="verify", daemon=True)
            self._reading.start()

    def _retain(self, entries: Sequence[listing.Entry]) -> None:
        """Delete what may go, each made incomplete in one stroke first."""
        try:
            for entry in self._retention.doomed(entries):
                if object_store.remote(entry.path):
                    (entry.path / listing.COMMIT_FILE).unlink()
                    delete(entry.path)
                    continue
                doomed = entry.path.with_name(f"{entry.path.name}{listing.TMP_SUFFIX}-old")
                delete(entry.path.rename(doomed))
        except OSError as error:
            log.warning("old checkpoints in %s stay: %s", self.directory, error)

    def _trust(self, entries: Sequence[listing.Entry]) -> list[listing.Entry]:
        """The entries, those marked that have become trusted."""
        found = []
        for entry in entries:
            old_enough = entry.step + self._trust_after <= self.healthy
            if entry.status == "verified" and old_enough and not entry.trusted:
                _mark(entry, trusted=True)
                entry = replace(entry, trusted=True)
            found.append(entry)
        return found

    def _verify(self) -> None:
        """Read back what nobody has, the newest first; runs in a daemon thread."""
        tried: set[int] = set()
        try:
            while todo := [
                e.step
                for e in listing.scan(self.directory)
                if e.status == "committed" and e.step not in tried
            ]:
                tried.add(todo[-1])
                self._verify_one(todo[-1])
        except _GivenUpError:
            pass
        except OSError as error:
            log.warning("checkpoints in %s could not be read back: %s", self.directory, error)

    def _verify_one(self, step: int) -> None:
        path, began, count = listing.folder(self.directory, step), time.monotonic(), 0

        def pause(read: int) -> None:
            nonlocal count
            count += read
            while not self._give_up.is_set():
                if self._hurry.is_set():
                    return
                ahead_s = began + count / self._bytes_per_s - time.monotonic()
                if ahead_s <= 0:
                    return
                self._give_up.wait(min(ahead_s, _LOOK_S))
            raise _GivenUpError

        try:
            bad = bad_leaves(path, pause)
        except (OSError, JaxrelError) as error:
            if listing.present(path):  # else retention was quicker
                log.warning("checkpoint %s could not be read back: %s", path, error)
            return
        if bad and listing.present(path):
            why = f"checkpoint {path} is corrupt: read back, digests differ in {some(bad)}"
            log.error("%s", why)
            self.mark(step, corrupt=why)
            self._refused.append((step, why))
        elif not bad:
            self.mark(step, verified=True)


def _mark(entry: listing.Entry, **found: object) -> None:
    if entry.state_digest is not None:  # else its own manifest tells enough
        try:
            marks.add(entry.path, entry.state_digest, **found)
        except OSError as error:
            log.warning("%s could not be marked: %s", entry.path, error)


def delete(path: epath.Path) -> None:
    """Remove a folder; a failure is only logged, for the checkpoints that count are safe."""
    try:
        path.rmtree()
    except OSError as error:
        log.warning("%s could not be deleted: %s", path, error)
