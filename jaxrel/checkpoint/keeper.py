"""What becomes of checkpoints after their commit: read back, judged, set aside, deleted.

Process 0's part of a `Checkpointer`. Nothing here stops a run: a failure is logged, for the
checkpoints that count are safe.
"""

import logging
import secrets
import threading
import time
from collections.abc import Sequence

from etils import epath

from jaxrel.checkpoint import listing, marks
from jaxrel.checkpoint.readback import bad_leaves
from jaxrel.checkpoint.retention import Retention
from jaxrel.exit_codes import JaxrelError

_CLOSING_S = 30.0
"""Longest that the end of a run waits for its last checkpoint to be read back."""
_LOOK_S = 0.2

log = logging.getLogger(__name__)


class _GivenUpError(Exception):
    """The checkpointer is closed, or a newer checkpoint is there to be read back."""


class Keeper:
    """Keeps one checkpoint directory; all but `healthy` and `refused` are process 0's."""

    def __init__(
        self, directory: epath.Path, retention: Retention, verify_mb_s: float, trust_after: int
    ) -> None:
        self.directory = directory
        self.healthy = -1
        """Newest step without a sign of trouble."""
        self._retention = retention
        self._bytes_per_s = verify_mb_s * 1e6
        self._trust_after = trust_after
        self._refused: list[tuple[int, str]] = []
        self._reading: threading.Thread | None = None
        self._give_up = threading.Event()

    def landed(self) -> None:
        """A checkpoint is complete: others may go, and it is read back."""
        self._trust()
        self._retain()
        self._read_back()

    def _read_back(self) -> None:
        if self._bytes_per_s and (self._reading is None or not self._reading.is_alive()):
            self._reading = threading.Thread(target=self._verify, name="verify", daemon=True)
            self._reading.start()

    def refused(self) -> list[tuple[int, str]]:
        """Step and reason of what was found damaged since this was called last."""
        found, self._refused = self._refused, []
        return found

    def close(self, patient: bool) -> None:
        """Stop the reading; `patient` lets it come to its end if that is near."""
        if self._reading is None:
            return
        if patient:
            self._bytes_per_s = float("inf")
            self._reading.join(_CLOSING_S)
            self._read_back()  # what landed just before it ended
            self._reading.join(_CLOSING_S)
            self._trust()
        self._give_up.set()
        self._reading.join(1.0)

    def mark(self, step: int, **found: object) -> None:
        """Put on disk what was found out about a step."""
        entries = [e for e in listing.scan(self.directory) if e.step == step and e.complete]
        for entry in entries:
            if entry.state_digest is not None:  # else its own manifest tells enough
                try:
                    marks.add(entry.path, entry.state_digest, **found)
                except OSError as error:
                    log.warning("%s could not be marked: %s", entry.path, error)

    def set_aside(self, entries: Sequence[listing.Entry]) -> None:
        """Take steps of another timeline out of the way. Raises OSError."""
        for entry in entries:
            name = f"{entry.path.name}{listing.ASIDE_SUFFIX}-{secrets.token_hex(4)}"
            entry.path.rename(entry.path.with_name(name))
            log.warning("step %d of a timeline that was left is set aside as %s", entry.step, name)

    def sweep(self) -> None:
        """Delete what saves that never ended left behind."""
        for entry in listing.scan(self.directory):
            if listing.TMP_SUFFIX in entry.path.name:
                _delete(entry.path)

    def _retain(self) -> None:
        """Delete what may go, each made incomplete in one stroke first."""
        try:
            for entry in self._retention.doomed(listing.scan(self.directory)):
                doomed = entry.path.with_name(f"{entry.path.name}{listing.TMP_SUFFIX}-old")
                _delete(entry.path.rename(doomed))
        except OSError as error:
            log.warning("old checkpoints in %s stay: %s", self.directory, error)

    def _trust(self) -> None:
        for entry in listing.scan(self.directory):
            old_enough = entry.step + self._trust_after <= self.healthy
            if entry.status == "verified" and old_enough and not entry.trusted:
                self.mark(entry.step, trusted=True)

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
        path, began, count = self.directory / str(step), time.monotonic(), 0

        def pause(read: int) -> None:
            nonlocal count
            count += read
            while not self._give_up.is_set():
                ahead_s = began + count / self._bytes_per_s - time.monotonic()
                if ahead_s <= 0:
                    return
                self._give_up.wait(min(ahead_s, _LOOK_S))  # the pace may have changed
            raise _GivenUpError

        try:
            bad = bad_leaves(path, pause)
        except (OSError, JaxrelError) as error:
            if path.exists():  # else retention was quicker
                log.warning("checkpoint %s could not be read back: %s", path, error)
            return
        if bad and path.exists():
            why = f"checkpoint {path} is corrupt: read back, digests differ in {', '.join(bad)}"
            log.error("%s", why)
            self.mark(step, corrupt=why)
            self._refused.append((step, why))
        elif not bad:
            self.mark(step, verified=True)


def _delete(path: epath.Path) -> None:
    """Remove a folder; a failure is only logged, for the checkpoints that count are safe."""
    try:
        path.rmtree()
    except OSError as error:
        log.warning("%s could not be deleted: %s", path, error)
