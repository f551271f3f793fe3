"""Save a state in the background, and restore it onto whatever mesh there is.

Orbax writes and commits; this adds a manifest of digests, which makes a restore exact or
refused, and makes every failure of a save heard.
"""

import logging
import math
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxrel.checkpoint import engine, leaves, listing, manifest
from jaxrel.checkpoint.together import agreed, together
from jaxrel.digest import leaf_digests, leaf_paths, state_digest
from jaxrel.exit_codes import DataRefusedError, FailedError, UsageError

_NAMED = 8
"""Leaves that an error message names before it counts the rest."""

log = logging.getLogger(__name__)


class SaveFailedError(FailedError):
    """A save that failed or is overdue; `step` says which."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"the save of step {step} {what}")
        self.step = step


@dataclass(frozen=True)
class Landed:
    """A save that is complete on disk."""

    step: int
    seconds: float
    """From the call of `save` to the commit."""
    blocking_s: float
    """Of that, what `save` itself took."""
    state_digest: str


@dataclass
class _Flight:
    """A save on its way to disk."""

    step: int
    thread: threading.Thread
    state_digest: str
    started: float
    handed_over: float = field(default_factory=time.monotonic)
    committed: float | None = None
    error: BaseException | None = None


class Checkpointer:
    """The checkpoints of one run, in one directory, written by one job.

    In a job of several processes every process makes the same calls: each writes the shards
    it holds, and process 0 decides what all of them must agree on. Leaving the `with` block,
    in whatever way, joins the save in flight.

    Args:
        directory: Where the steps are; made by the first save. Opening it changes nothing.
        keep: Newest checkpoints that are kept; an older one goes only after a newer one is
            complete, and nothing goes that jaxrel did not write.
        deadline_s: Seconds a save may take before it counts as failed.
    """

    def __init__(
        self, directory: epath.PathLike, *, keep: int = 3, deadline_s: float = 600.0
    ) -> None:
        if keep < 1:
            raise UsageError(f"checkpoint keep {keep}: expected at least 1")
        if not deadline_s > 0:
            raise UsageError(f"checkpoint deadline {deadline_s} s: expected more than 0")
        self.directory = epath.Path(directory).expanduser().resolve()
        if self.directory.exists() and not self.directory.is_dir():
            raise UsageError(f"checkpoint directory {self.directory} is not a directory")
        self.keep = keep
        self.deadline_s = deadline_s
        self._arrays = engine.array_handler()
        self._orbax = engine.writer(self._arrays, math.ceil(deadline_s), self._temporary_name)
        self._flight: _Flight | None = None
        self._landed: list[Landed] = []
        self._attempt: int | None = None
        self._saves = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            log.error("%s", failure)  # what made the run stop stays the reported error
            error.add_note(f"besides, {failure}")

    def save(
        self,
        step: int,
        state: Any,
        *,
        extra: Mapping[str, Any] | None = None,
        words: Any = None,
    ) -> str:
        """Copy `state` off the devices and write it in the background as `step`.

        When it returns, the state may be donated. It waits for the save before it, if that is
        still on its way.

        Args:
            step: Completed updates; above every step that the directory holds.
            state: Any pytree of arrays, typed random keys among them.
            extra: What belongs to the state besides its arrays, as JSON; of several processes,
                process 0's is written.
            words: `StepRecord.words` of the step that made `state`, uint32 [leaves, 2]: saves
                digesting it again, and what changed since then is refused by every restore.

        Returns:
            The state digest.

        Raises:
            DataRefusedError: `step` is not newer than what is there, or its place is taken.
            UsageError: a leaf is no array, `extra` is not JSON, or `step` is negative.
            FailedError: this save or the one before it failed.
        """
        started = time.monotonic()
        self.wait()
        if step < 0:
            raise UsageError(f"step {step} cannot be saved: expected 0 or more")
        together(lambda: self._claim(step))
        if self._attempt is None:
            self._attempt = agreed(lambda: secrets.randbits(31))
        self._saves += 1
        state = leaves.as_arrays(state)
        description = _describe(step, state, extra, words)
        arrays = leaves.stored(state)
        if not arrays:
            raise UsageError("the state has no leaf with elements: there is nothing to save")
        save_args = {path: ocp.SaveArgs(chunk_byte_size=engine.CHUNK_BYTES) for path in arrays}
        items = {
            listing.STATE_ITEM: ocp.args.PyTreeSave(arrays, save_args=save_args),
            manifest.ITEM: ocp.args.JsonSave(description),
        }
        try:
            self._orbax.save(self._path(step), args=ocp.args.Composite(**items))
        except OSError as error:
            raise SaveFailedError(step, f"failed: {error}") from error
        thread = threading.Thread(target=self._land, name="checkpoint", daemon=True)
        self._flight = _Flight(step, thread, description["state_digest"], started)
        thread.start()
        return description["state_digest"]

    def check(self) -> None:
        """Raise FailedError, naming the step, if a background save failed or is overdue.

        Costs nothing; call it every step. A failure is raised once, on the process where it
        happened; the others hear of it when they wait for that one, at the deadline.
        """
        flight = self._flight
        if flight is None:
            return
        if not flight.thread.is_alive():
            self._flight = None
            if flight.error is not None:
                raise SaveFailedError(
                    flight.step, f"failed: {_line(flight.error)}"
                ) from flight.error
            assert flight.committed is not None
            self._landed.append(
                Landed(
                    flight.step,
                    flight.committed - flight.started,
                    flight.handed_over - flight.started,
                    flight.state_digest,
                )
            )
        elif time.monotonic() - flight.handed_over > self.deadline_s:
            raise SaveFailedError(flight.step, f"is not finished after {self.deadline_s:g} s")

    def landed(self) -> list[Landed]:
        """The saves that `check` or `wait` found complete since this was called last."""
        landed, self._landed = self._landed, []
        return landed

    def wait(self, deadline_s: float | None = None) -> None:
        """Join the save in flight.

        Waits `deadline_s` seconds from now, or what is left of the checkpointer's own deadline;
        then raises FailedError, naming the step. The threads of an overdue save cannot be
        stopped: the process has to leave by `os._exit`.
        """
        flight = self._flight
        if flight is None:
            return
        if deadline_s is None:
            deadline_s = max(0.0, flight.handed_over + self.deadline_s - time.monotonic())
        flight.thread.join(deadline_s)
        if flight.thread.is_alive():
            took = time.monotonic() - flight.handed_over
            raise SaveFailedError(flight.step, f"is not finished after {took:.1f} s")
        self.check()

    def close(self) -> None:
        """Join the save in flight, as `wait`, and release Orbax's threads."""
        try:
            self.wait()
        finally:
            if self._flight is None:
                self._orbax.close()

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint on disk, read anew; None if there is none.

        Every process must call it; process 0's answer holds for all.
        """
        self.check()
        step = agreed(lambda: -1 if (n := listing.newest(self.directory)) is None else n)
        return None if step < 0 else step

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Read a checkpoint straight onto the devices, and prove that it is what was saved.

        Args:
            abstract_state: Pytree of `jax.ShapeDtypeStruct`s whose shardings say where each leaf
                goes, on any mesh; a leaf without one is replicated.
            step: Which checkpoint; None is the newest.

        Returns:
            The state, and the manifest with the `extra` that was saved.

        Raises:
            DataRefusedError: there is no such checkpoint, its leaves differ from those asked
                for (each is named), it cannot be read, or its digests differ.
        """
        self.wait()
        if step is None and (step := self.latest()) is None:
            raise DataRefusedError(f"no complete checkpoint in {self.directory}")
        path = self._path(step)
        wanted = leaves.kinds(abstract_state)
        found = together(lambda: self._read_manifest(path, wanted))
        specs = leaves.stored_specs(abstract_state)
        arrays = together(lambda: self._read_arrays(path, specs))
        impls = {p: leaf["key_impl"] for p, leaf in found["leaves"].items() if "key_impl" in leaf}
        state = leaves.assemble(abstract_state, arrays, specs, impls)
        _verify(path, state, found)
        return state, found

    def _path(self, step: int) -> epath.Path:
        return self.directory / str(step)

    def _temporary_name(self, name: str) -> str:
        """A name that no other save uses: writers of a dead one may still be at work in its own."""
        return f"{name}{listing.TMP_SUFFIX}-{self._attempt:08x}-{self._saves}"

    def _claim(self, step: int) -> None:
        """On process 0: refuse a step that cannot be saved, sweep what dead saves left behind.

        They are swept here and not at the start, so that a reader of a directory in which a
        run is saving never takes its save away.
        """
        if jax.process_index() != 0:
            return
        refusal = f"step {step} cannot be saved"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            newest = listing.newest(self.directory)
            if newest is not None and step <= newest:
                raise DataRefusedError(f"{refusal}: {self.directory} already holds step {newest}")
            if self._path(step).exists():
                raise DataRefusedError(
                    f"{refusal}: {self._path(step)} is in its place and is not a checkpoint of"
                    " jaxrel; move it away"
                )
            for entry in listing.scan(self.directory):
                if listing.TMP_SUFFIX in entry.path.name:
                    _delete(entry.path)
        except OSError as error:
            raise FailedError(f"{refusal}: {error}") from error

    def _land(self) -> None:
        """Wait for the commit, then for retention; runs in a daemon thread."""
        flight = self._flight
        assert flight is not None
        try:
            self._orbax.wait_until_finished()
        except BaseException as error:
            flight.error = error
            return
        flight.committed = time.monotonic()
        if jax.process_index() == 0:
            self._retain()

    def _retain(self) -> None:
        """Delete the oldest checkpoints beyond `keep`, each made incomplete in one stroke first."""
        try:
            good = [e for e in listing.scan(self.directory) if e.status == "committed"]
            for entry in good[: -self.keep]:
                doomed = entry.path.with_name(f"{entry.path.name}{listing.TMP_SUFFIX}-old")
                _delete(entry.path.rename(doomed))
        except OSError as error:
            log.warning("old checkpoints in %s stay: %s", self.directory, error)

    def _read_manifest(self, path: epath.Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
        try:
            found = manifest.read(path)
        except (FileNotFoundError, NotADirectoryError, manifest.NotOursError) as error:
            raise DataRefusedError(f"{path} is not a complete checkpoint") from error
        if differing := manifest.differences(found["leaves"], wanted):
            raise DataRefusedError(f"checkpoint {path} does not fit this state: {_some(differing)}")
        return found

    def _read_arrays(
        self, path: epath.Path, specs: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        specs = {name: spec for name, spec in specs.items() if spec.size}
        args = {
            name: ocp.ArrayRestoreArgs(sharding=spec.sharding, global_shape=spec.shape)
            for name, spec in specs.items()
        }
        try:
            arrays = self._arrays.restore(
                path / listing.STATE_ITEM, args=ocp.args.PyTreeRestore(restore_args=args)
            )
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # the devices, not the data
        except Exception as error:
            raise DataRefusedError(f"checkpoint {path} cannot be read: {_line(error)}") from error
        if differing := manifest.differences(leaves.kinds(arrays), leaves.kinds(specs)):
            raise DataRefusedError(f"checkpoint {path} is corrupt: {_some(differing)}")
        return arrays


def _delete(path: epath.Path) -> None:
    """Remove a folder; a failure is only logged, for the checkpoints that count are safe."""
    try:
        path.rmtree()
    except OSError as error:
        log.warning("%s could not be deleted: %s", path, error)


def _describe(step: int, state: Any, extra: Mapping[str, Any] | None, words: Any) -> dict[str, Any]:
    """The manifest of `state`; collective where the digests are not given."""
    described = leaves.kinds(state)
    words = leaves.words(state) if words is None else words
    for path, digest in leaf_digests(state, words).items():
        described[path]["digest"] = digest
    for path, leaf in zip(leaf_paths(state), jax.tree.leaves(state), strict=True):
        if leaves.is_key(leaf):
            described[path]["key_impl"] = str(jax.random.key_impl(leaf))
    content = {
        "format": manifest.FORMAT,
        "step": int(step),
        "state_digest": state_digest(state, words),
        "leaves": described,
        "extra": dict(extra or {}),
    }
    try:
        return manifest.seal(content)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the extra of step {step} is not JSON: {error}") from error


def _verify(path: epath.Path, state: Any, found: Mapping[str, Any]) -> None:
    """Raise DataRefusedError naming the leaves that are not what was saved; collective."""
    words = leaves.words(state)
    digests = leaf_digests(state, words)
    bad = [leaf for leaf, digest in digests.items() if digest != found["leaves"][leaf]["digest"]]
    if bad:
        raise DataRefusedError(f"checkpoint {path} is corrupt: digests differ in {_some(bad)}")
    if state_digest(state, words) != found["state_digest"]:
        raise DataRefusedError(f"checkpoint {path} is corrupt: its state digest differs")


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return "; ".join(names[:_NAMED]) + (f"; and {rest} more" if rest > 0 else "")


def _line(error: BaseException) -> str:
    """One line on the error that started a chain; storage puts the reason at the end."""
    while error.__cause__ is not None:
        error = error.__cause__
    reason = " ".join(str(error).split()).split(" [tensorstore_spec=")[0]
    text = f"{type(error).__name__}: {reason}".removesuffix(": ")
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-300:]}"
