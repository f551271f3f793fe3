"""A training loop of your own, made resumable, supervised and reported, in a few lines:

    run = jaxrel.attach("run", (model, optimizer), steps=1000, data=iterator)
    for step in run:                    # from wherever the newest checkpoint left off
        loss = train_step(model, optimizer, next(iterator))
        run.completed(loss=loss)

Flax NNX objects are read and updated in place. A loop over a value, as with Linen or plain
functions, takes it from `run.state` and gives the new one to `run.completed(state, loss=...)`.
"""

import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrel.checkpoint import Checkpointer, local_files
from jaxrel.checkpoint.host_random import capture, derive, restore
from jaxrel.checkpoint.shared import check_shared
from jaxrel.checkpoint.together import agreed, from_everyone, together
from jaxrel.config import Config
from jaxrel.config_file import with_environment
from jaxrel.exit_codes import (
    DataRefusedError,
    DivergedError,
    ExitCode,
    JaxrelError,
    PreemptedError,
    UsageError,
)
from jaxrel.mesh.compile_cache import use_compile_cache
from jaxrel.mesh.join import joined, use_cpu_devices
from jaxrel.run_lock import claim
from jaxrel.train.recorder import Recorder, begin_together, dump_on_request
from jaxrel.train.stop import StopSignal

_JOIN_S = 60.0
_process = contextlib.ExitStack()
"""What lasts as long as this process: its place in the job."""


def join() -> None:
    """Take this process's place in the job that `jaxrel launch` started; else do nothing.

    Only a job of several processes, or one with --cpu-devices, needs it: before JAX's devices
    are first used. Raises FailedError naming processes that do not come.
    """
    config = with_environment(Config())
    if config.mesh.cpu_devices is not None:
        use_cpu_devices(config.mesh.cpu_devices)
    _process.enter_context(joined(config.job))


def attach(
    run_dir: str | os.PathLike[str],
    state: Any,
    *,
    steps: int,
    data: Any = None,
    interval: int = 100,
    keep: int = 3,
    seed: int = 0,
    local_dir: str | None = None,
    local_interval: int = 10,
) -> "Run":
    """Make a loop resumable: restores `state` and `data` from the newest checkpoint, if any.

    Args:
        run_dir: Directory of the run: ledger, checkpoints, TensorBoard files.
        state: NNX objects (a model and its optimizer), updated in place, or any pytree of
            arrays. Everything that training changes belongs to it.
        steps: Updates after which the run is complete.
        data: The iterator from which the loop draws one batch a step, with `get_state` and
            `set_state` as Grain's have; None where a batch follows from the step's number.
        interval: Steps between checkpoints; the last step is always saved.
        keep: Newest checkpoints kept.
        seed: For Python's and NumPy's generators in a new run.
        local_dir: A directory on a RAM disk or NVMe of each host, for checkpoints between the
            others, as `checkpoint.local_dir` of `jaxrel train`.
        local_interval: Steps between these.

    Raises UsageError and DataRefusedError. In a script, these and every other exception from
    here on end the process with the exit code that a supervisor understands.
    """
    local = None if local_dir is None else (local_dir, local_interval)
    return Run(Path(run_dir), state, data, steps, interval, keep, seed, local)


class Run:
    """A loop that `attach` made resumable. Iterating gives the numbers of the steps, from 0."""

    def __init__(
        self,
        run_dir: Path,
        state: Any,
        data: Any,
        steps: int,
        interval: int,
        keep: int,
        seed: int,
        local: tuple[str, int] | None,
    ) -> None:
        self.run_dir, self.steps, self.interval = run_dir, steps, interval
        self._local_interval = local[1] if local else 0
        self._in_place = _has_nnx(state)
        self.state = state
        """The state of the last completed step."""
        self._data = data
        self._recorder = Recorder()
        sys.excepthook = self._leave
        for name, value in (
            ("steps", steps),
            ("interval", interval),
            ("keep", keep),
            ("local_interval", local[1] if local else 1),
        ):
            if value < 1:
                raise UsageError(f"{name}: got {value}: expected at least 1")
        _check_job()
        if data is not None and not (hasattr(data, "get_state") and hasattr(data, "set_state")):
            raise UsageError(
                f"data: got {type(data).__name__}: expected an iterator with get_state and"
                " set_state, as Grain's have, or None where a batch follows from the step's number"
            )
        self._recorder.phase("start")
        self._name = agreed(lambda: local_files.run_name(run_dir))
        folder = local_files.run_folder(local[0], self._name) if local else None
        self._checkpointer = Checkpointer(run_dir / "checkpoints", keep=keep, local_dir=folder)
        try:
            latest = self._checkpointer.latest(proven_from=steps)
        finally:
            self._recorder.refused(self._checkpointer)
        if latest is not None:
            self._checkpointer.compare(jax.tree.map(_abstract, self._arrays()), latest)
        self.done = latest or 0
        """Completed updates."""
        self._told, self._compiled = self.done, False
        self._waiting: tuple[int, Any] | None = None
        self._stop = StopSignal()
        self._saved = self.done if self._checkpointer.is_durable(self.done) else 0
        if self.done >= steps and self._saved == self.done:
            print(f"already complete: step {self.done} is saved, steps is {steps}", file=sys.stderr)
            self._recorder.done()
        else:
            self._begin(latest, seed)

    def __iter__(self) -> Iterator[int]:
        """The steps that are left; what comes after the loop's body is done here."""
        if self._saved >= self.steps:
            return
        # An exception in the loop's body ends this generator before `_leave` hears of it, so the
        # recorder is closed there, or at the end of the process.
        atexit.register(self._recorder.__exit__, None, None, None)
        with self._checkpointer, self._stop:
            while self.done < self.steps and not self._stop.asked(self.done):
                step = self.done
                yield step
                if self.done == step:
                    self.completed()
            self._tell()
            if self.done > self._saved:
                self._save()
            self._recorder.phase("checkpoint", self.done)
            self._recorder.saves(self._checkpointer, self._checkpointer.wait)
            if self.done < self.steps:
                what = f"step {self.done} is saved" if self.done else "no step was complete"
                raise PreemptedError(f"asked to stop: {what}; start again to go on")
            self._recorder.saves(self._checkpointer, lambda: together(self._checkpointer.settle))
            self._recorder.phase("stop", self.done)
            self._recorder.finished(self.done, self._digest)
        atexit.register(self._recorder.done)

    def completed(self, state: Any = None, *, loss: Any = None, **fields: Any) -> None:
        """One more update is done (it may still be under way on the devices).

        Args:
            state: The new state, where it is not updated in place.
            loss: The step's loss: a number, or an array that becomes one.
            fields: `grad_norm`, `learning_rate`: numbers, as in `events.StepCompleted`.

        Raises DivergedError when a loss is not finite; nothing is saved then.
        """
        if state is not None:
            self.state = state
        elif not self._in_place:
            raise UsageError("completed: got no state: this loop's state is not updated in place")
        if not self._compiled:  # it was, in what came before this call
            self._recorder.phase("train", self.done)
            self._compiled = True
        self._tell()
        self.done += 1
        self._waiting = (self.done, {"loss": loss, **fields})
        self._recorder.at("step", self._told, self.done)
        self._recorder.saves(self._checkpointer, self._checkpointer.check)
        if self.done % self.interval == 0 or self.done == self.steps:
            self._save()
        elif self._local_interval and self.done % self._local_interval == 0:
            self._save_locally()

    def _begin(self, latest: int | None, seed: int) -> None:
        together(self._claim)
        check_shared(self._checkpointer.directory)
        begin_together(self._recorder, self.run_dir)
        dump_on_request(self.run_dir, self._recorder.heartbeat)
        use_compile_cache(self.run_dir / "compiled")
        self._recorder.phase("restore")
        digest = None
        if latest is None:
            derive(seed, jax.process_index(), 0)
        else:
            digest = self._restore(seed)
            print(f"resumed from step {self.done}", file=sys.stderr)
        devices = {"devices": jax.device_count()}
        self._recorder.resumed(self.done, devices, digest)
        self._recorder.phase("compile", self.done)
        self._digest = digest or ""

    def _claim(self) -> None:
        """Process 0's part: hold the run directory, and name the run's folders on its hosts."""
        if jax.process_index() == 0:
            claim(self.run_dir)
            if self._local_interval:
                local_files.keep_name(self.run_dir, self._name)

    def _restore(self, seed: int) -> str:
        """Bring state, data and host random states back; returns the state's digest."""
        now = self._arrays()
        try:
            found, manifest = self._checkpointer.restore(jax.tree.map(_abstract, now))
        finally:
            self._recorder.refused(self._checkpointer)
        self.done = self._told = manifest["step"]
        self._saved = self.done if self._checkpointer.is_durable(self.done) else 0
        together(lambda: self._bring_back(now, found, manifest, seed))
        return manifest["state_digest"]

    def _bring_back(self, now: Any, found: Any, manifest: Any, seed: int) -> None:
        step = manifest["step"]
        found = jax.tree.map(_as_before, now, found)
        if self._in_place:
            state = nnx.state(self.state)
            nnx.replace_by_pure_dict(state, found)
            nnx.update(self.state, state)
        else:
            self.state = found
        extra = manifest["extra"]
        restore(extra["host_random"], seed=seed, step=step)
        positions = extra.get("position")
        if (positions is None) != (self._data is None):
            what = "has no data position" if positions is None else "has a data position"
            raise DataRefusedError(f"checkpoint of step {step}: {what}, and this run is otherwise")
        if positions is not None:
            if len(positions) != jax.process_count():
                raise DataRefusedError(
                    f"checkpoint of step {step}: its data position is that of {len(positions)}"
                    f" processes, here are {jax.process_count()}"
                )
            self._data.set_state(positions[jax.process_index()])

    def _save_locally(self) -> None:
        self._tell()
        self._recorder.phase("checkpoint", self.done)
        self._recorder.sync()
        self._checkpointer.save_local(self.done, self._arrays(), extra=self._extra())
        self._recorder.phase("train", self.done)

    def _extra(self) -> dict[str, Any]:
        position = None if self._data is None else from_everyone(self._data.get_state())
        return {"position": position, "host_random": capture()}

    def _save(self) -> None:
        self._tell()
        self._recorder.phase("checkpoint", self.done)
        self._recorder.sync()
        extra = self._extra()
        self._recorder.saves(self._checkpointer, self._checkpointer.wait)
        self._digest = self._checkpointer.save(self.done, self._arrays(), extra=extra)
        self._saved = self.done
        self._recorder.phase("train", self.done)

    def _arrays(self) -> Any:
        return nnx.to_pure_dict(nnx.state(self.state)) if self._in_place else self.state

    def _tell(self) -> None:
        """Record the step before, whose loss is known by now: so one is always under way."""
        if self._waiting is None:
            return
        (step, fields), self._waiting = self._waiting, None
        known: dict[str, Any] = {n: None if x is None else float(x) for n, x in fields.items()}
        loss = known["loss"]
        if loss is not None and not np.isfinite(loss):
            raise DivergedError(f"step {step}: loss {loss:g}; nothing after this is saved")
        self._recorder.step(step, **known)
        self._checkpointer.healthy(step)
        self._recorder.at("data", step, self.done)
        self._told = step

    def _leave(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Called for an exception that nobody caught: the exit code says what it was."""
        if isinstance(error, JaxrelError):
            print(f"jaxrel: {' '.join(str(error).split())}", file=sys.stderr)
            code = int(error.code)
        else:
            traceback.print_exception(kind, error, trace)
            interrupted = isinstance(error, KeyboardInterrupt)
            code = int(ExitCode.INTERRUPTED if interrupted else ExitCode.FAILED)
        with contextlib.suppress(Exception):
            self._checkpointer.wait(_JOIN_S)  # a save in flight is as good as any
        self._recorder.__exit__(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # Python would first wait for threads, and JAX for processes that are gone


def _check_job() -> None:
    """Raise UsageError in a process of several that has not joined the others."""
    wanted = with_environment(Config()).job.num_processes or 1
    if wanted > 1 and jax.process_count() == 1:
        raise UsageError(
            f"attach: this is one of {wanted} processes of a job and has not joined it: call"
            " jaxrel.join() before JAX is first used"
        )


def _has_nnx(state: Any) -> bool:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    return any(isinstance(leaf, nnx.Pytree) for leaf in leaves)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _as_before(old: Any, new: jax.Array) -> Any:
    """The restored array, free to move to other devices if the one before was."""
    if getattr(old, "committed", False) or jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
        return new
    return jnp.asarray(np.asarray(new))
