"""Save a state in the background, and restore it onto whatever mesh there is.

Orbax writes and commits; this adds a manifest of digests, which makes a restore exact or
refused, and makes every failure of a save heard.
"""

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxrel.checkpoint import engine, leaves, listing, manifest, object_store
from jaxrel.checkpoint.candidates import Candidates
from jaxrel.checkpoint.describe import describe
from jaxrel.checkpoint.errors import DamagedError, SaveFailedError, may_pass, one_line
from jaxrel.checkpoint.flight import Flight, Landed
from jaxrel.checkpoint.keeper import Keeper
from jaxrel.checkpoint.local import LocalTier, Whole
from jaxrel.checkpoint.restoring import (
    Allowed,
    check_fits,
    placed,
    read_manifest,
    read_state,
)
from jaxrel.checkpoint.retention import Retention
from jaxrel.checkpoint.together import agreed, together
from jaxrel.exit_codes import DataRefusedError, FailedError, UsageError

log = logging.getLogger(__name__)

_LOCAL_S = 10.0
"""Longest that the end of a run waits for the local tier, which never counts alone."""


class Checkpointer:
    """The checkpoints of one run, in one directory, written by one job.

    In a job of several processes every process makes the same calls: each writes the shards
    it holds, and process 0 decides what all of them must agree on. Leaving the `with` block,
    in whatever way, joins the save in flight.

    Args:
        directory: Where the steps are, a path or `s3://bucket/prefix`; made by the first save.
            Opening it changes nothing.
        keep: Newest good checkpoints that are kept, at least 2; an older one goes only after a
            newer one is complete, and nothing goes that jaxrel did not write.
        deadline_s: Seconds a save may take before it counts as failed.
        keep_every: Steps that this divides are kept for ever; 0 is none.
        keep_best: Of those saved with a metric, how many with the lowest are kept too.
        verify_mb_s: Megabytes a second at which each checkpoint is read back and proven in
            the background, so that training hardly notices; 0 never does.
        trust_after: Steps that the run must go on from a verified checkpoint, without a sign of
            trouble, before a roll-back may choose it.
        local_dir: Where `save_local` writes, a path on a RAM disk or NVMe of each host; of this
            run alone.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        keep: int = 3,
        deadline_s: float = 600.0,
        keep_every: int = 0,
        keep_best: int = 0,
        verify_mb_s: float = 100.0,
        trust_after: int = 100,
        local_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not deadline_s > 0:
            raise UsageError(f"checkpoint deadline {deadline_s} s: expected more than 0")
        self.directory = object_store.place(directory)
        try:
            if self.directory.exists() and not self.directory.is_dir():
                raise UsageError(f"checkpoint directory {self.directory} is not a directory")
        except OSError as error:
            raise FailedError(f"checkpoint directory {directory}: {one_line(error)}") from error
        retention = Retention(keep, keep_every, keep_best)
        self._keeper = Keeper(self.directory, retention, verify_mb_s, trust_after)
        self.deadline_s = deadline_s
        self.local = None if local_dir is None else LocalTier(Path(local_dir).expanduser())
        """The local tier."""
        self._candidates = Candidates(self.directory, self._keeper, self.local)
        self._arrays = engine.array_handler()
        self._remote = object_store.remote(self.directory)
        if self._remote:
            engine.add_s3()
        self._orbax = engine.writer(
            self._arrays, math.ceil(deadline_s), self._temporary_name, renames=not self._remote
        )
        self._flight: Flight | None = None
        self._landed: list[Landed] = []
        self.newest_landed: Landed | None = None
        """The newest save that this one is known to have completed."""
        self._line: int | None = None
        """Newest step of the timeline that this one writes; newer ones are of another."""
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
            self.close() if error is None else self._leave()
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
        metric: float | None = None,
    ) -> str:
        """Copy `state` off the devices and write it in the background as `step`.

        When it returns, the state may be donated. It waits for the save before it, if that is
        still on its way.

        Args:
            step: Completed updates; above every step of this timeline. Where the run was restored
                from an older step than the newest, the newer ones are set aside.
            state: Any pytree of arrays, typed random keys among them.
            extra: What belongs to the state besides its arrays, as JSON; of several processes,
                process 0's is written.
            words: `StepRecord.words` of the step that made `state`, uint32 [leaves, 2]: saves
                digesting it again, and what changed since then is refused by every restore.
            metric: By which `keep_best` judges, as the held-out loss: lower is better.

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
        together(lambda: self._keeper.make_room(step, self._line))
        if self._attempt is None:
            self._attempt = agreed(lambda: secrets.randbits(31))
        self._saves += 1
        state = leaves.as_arrays(state)
        description = describe(step, state, extra, words, metric)
        arrays = leaves.stored(state)
        if not arrays:
            raise UsageError("the state has no leaf with elements: there is nothing to save")
        save_args = {path: ocp.SaveArgs(chunk_byte_size=engine.CHUNK_BYTES) for path in arrays}
        items = {
            listing.STATE_ITEM: ocp.args.PyTreeSave(arrays, save_args=save_args),
            manifest.ITEM: ocp.args.JsonSave(description),
        }
        try:
            self._orbax.save(self._new_path(step), args=ocp.args.Composite(**items))
        except OSError as error:
            told = f"failed: {error}"
            raise SaveFailedError(step, told, may_pass=may_pass(told)) from error
        thread = threading.Thread(target=self._land, name="checkpoint", daemon=True)
        self._flight = Flight(step, thread, description["state_digest"], started)
        thread.start()
        return description["state_digest"]

    def save_local(
        self, step: int, state: Any, *, extra: Mapping[str, Any] | None = None, words: Any = None
    ) -> bool:
        """Write `state` to the local tier in the background, as `save` does to the durable one.

        Arguments as of `save`. A failure is logged and changes nothing; False where the local
        save before this one is not finished, and this step is left out.
        """
        if self.local is None:
            raise UsageError(f"step {step} cannot be saved locally: there is no local_dir")
        if step != int(step) or step < 0:
            raise UsageError(f"step {step} cannot be saved: expected a whole number from 0")
        state = leaves.as_arrays(state)
        description = describe(step, state, extra, words)
        return self.local.save(step, description, leaves.stored(state))

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
            self.newest_landed = flight.landed()
            self._line = flight.step
            self._landed.append(self.newest_landed)
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

    def refused(self) -> list[tuple[int, str]]:
        """Step and reason of the checkpoints found damaged since this was called last."""
        return self._candidates.told() + self._keeper.refused()

    def healthy(self, step: int) -> None:
        """Up to `step`, the run shows no sign of trouble; costs nothing, call it every step."""
        self._keeper.healthy = step

    def close(self) -> None:
        """`settle`, and release all threads."""
        try:
            self.settle()
        finally:
            self._leave()

    def settle(self) -> None:
        """Join the save in flight, as `wait`, and the reading back of what is complete.

        For the end of a run; it waits a minute for the reading at most. Raises FailedError if
        the newest turned out damaged: a run must not end well on it.
        """
        self.wait()
        self._keeper.settle()
        newest = self.newest_landed and self.newest_landed.step
        for entry in listing.scan(self.directory):
            if entry.step == newest and entry.status == "corrupt":
                raise FailedError(f"{entry.why}; start again to go on from the one before")
        if self.local is not None and newest is not None:
            self.local.forget(before=newest + 1)

    def _leave(self) -> None:
        try:
            self.wait()
        finally:
            self._keeper.close()
            if self.local is not None:
                self.local.wait(_LOCAL_S)
            if self._flight is None:
                self._orbax.close()

    def latest(self, *, proven_from: int | None = None) -> int | None:
        """Step of the newest good checkpoint on disk, read anew; None if there is none at all.

        From the step `proven_from` on, where a run is complete, it is read back before it is
        called good. Every process must call it; process 0's answer holds for all. Raises
        DataRefusedError if there are some and all are known to be damaged, FailedError where a
        damaged one cannot be marked.
        """
        self.check()
        return self._candidates.newest(proven_from)

    def is_durable(self, step: int) -> bool:
        """Whether `step`, of `latest` or `restore`, is on more than its hosts' own disks."""
        return step not in self._candidates.whole

    def latest_trusted(self, before: int | None = None) -> int | None:
        """Step of the newest trusted checkpoint, older than the step `before`; None if none is.

        Every process must call it. What a roll-back goes to.
        """
        self.wait()

        def ask() -> int | None:
            trusted = [entry.step for entry in listing.scan(self.directory) if entry.trusted]
            return max((s for s in trusted if before is None or s < before), default=None)

        return agreed(ask)

    def compare(
        self,
        abstract_state: Any,
        step: int,
        *,
        cast: Sequence[str] = (),
        partial: Sequence[str] = (),
    ) -> None:
        """Raise DataRefusedError, as `restore` does, where the leaves differ; reads no array."""
        allowed = Allowed(cast, partial)
        if whole := self._candidates.whole.get(step):
            check_fits(self._local(step), whole.manifest, abstract_state, allowed)
        else:
            together(lambda: read_manifest(self._path(step), abstract_state, allowed))

    def manifest(self, step: int) -> dict[str, Any]:
        """What a checkpoint, `latest` for one, says about itself; its `extra` is what was saved.

        Raises DataRefusedError where it cannot be read.
        """
        if whole := self._candidates.whole.get(step):
            return whole.manifest
        try:
            return manifest.read(self._path(step))
        except (OSError, manifest.NotOursError) as error:
            raise DataRefusedError(f"checkpoint of step {step} cannot be read: {error}") from error

    def restore(
        self,
        abstract_state: Any,
        step: int | None = None,
        *,
        cast: Sequence[str] = (),
        partial: Sequence[str] = (),
    ) -> tuple[Any, dict[str, Any]]:
        """Read a checkpoint straight onto the devices, and prove that it is what was saved.

        Args:
            abstract_state: Pytree of `jax.ShapeDtypeStruct`s whose shardings say where each leaf
                goes, on any mesh; a leaf without one is replicated.
            step: Which checkpoint. None is the newest that is good: a damaged one is marked
                corrupt, told by `refused`, and the next older one is taken.
            cast: Patterns (`fnmatch`) of the paths of leaves that may have another dtype than
                was saved: they are cast.
            partial: Patterns of paths that may be in one of the two alone. A leaf that the
                checkpoint lacks keeps its value, so `abstract_state` must have an array there.

        Returns:
            The state, and the manifest: its `step`, and the `extra` that was saved.

        Raises:
            DataRefusedError: there is no such checkpoint, its leaves differ from those asked
                for (each is named), or none is good.
            DamagedError: the one that was asked for cannot be read, or its digests differ.
            FailedError: the storage does not let it be read.
        """
        self.wait()
        allowed = Allowed(cast, partial)
        whole = self._candidates.look()
        if step is not None:
            return self._restore(step, whole.get(step), abstract_state, allowed)
        good, reasons = agreed(self._candidates.judged)
        for step in sorted({*good, *whole}, reverse=True):
            try:
                return self._restore(step, whole.get(step), abstract_state, allowed)
            except DamagedError as error:
                proven = error.proven and step not in whole
                together(
                    lambda step=step, e=error, p=proven: self._candidates.condemn(step, e, mark=p)
                )
                reasons[str(step)] = str(error)
        if reasons:
            told = {int(step): why for step, why in reasons.items()}
            raise DataRefusedError(listing.none_good(self.directory, told))
        raise DataRefusedError(f"no complete checkpoint in {self.directory}")

    def _restore(
        self, step: int, whole: Whole | None, abstract_state: Any, allowed: Allowed
    ) -> tuple[Any, dict[str, Any]]:
        """From the durable tier, or `whole` from the local one; this timeline begins there."""
        if whole is None:
            state, found = read_state(self._arrays, self._path(step), abstract_state, allowed)
        else:
            local, found = self.local, whole.manifest
            assert local is not None
            check_fits(self._local(step), found, abstract_state, allowed)
            state = placed(
                self._local(step), abstract_state, found, lambda specs: local.read(whole, specs)
            )
        # What is durable already is not saved again; what is only local may be.
        self._line = step if whole is None else step - 1
        if self.local is not None:
            self.local.forget(after=step)
        return state, found

    def _path(self, step: int) -> epath.Path:
        return listing.folder(self.directory, step)

    def _local(self, step: int) -> str:
        assert self.local is not None
        return f"local checkpoint of step {step} in {self.local.directory}"

    def _new_path(self, step: int) -> epath.Path:
        name = f"{step}{listing.SAVE_SUFFIX}-{self._attempt:08x}-{self._saves}"
        return self.directory / (name if self._remote else str(step))

    def _temporary_name(self, name: str) -> str:
        """A name that no other save uses: writers of a dead one may still be at work in its own."""
        return f"{name}{listing.TMP_SUFFIX}-{self._attempt:08x}-{self._saves}"

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
            self._keeper.landed()
