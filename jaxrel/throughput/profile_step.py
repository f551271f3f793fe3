"""One step under the JAX profiler, and where its devices spent it.

A sample starts a profiler session, leaves marks for the step's begin and end, and reads the trace
from a temporary folder. JAX has one session a process: who profiles already is left alone, and
JAX refuses whoever starts during a sample.
"""

import logging
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions, TraceAnnotation

from jaxrel.throughput.device_split import DeviceSplit, split_step
from jaxrel.throughput.device_trace import STEP_BEGINS, STEP_ENDS, read_events, read_trace
from jaxrel.throughput.op_kinds import Program, read_program

log = logging.getLogger(__name__)


class Sampler:
    """Samples steps of a loop without waiting for a device; no method raises.

        sampler.begin()             # before the step is dispatched
        state, record = step(state, batch)
        jax.device_get(previous)    # in a loop that keeps one step under way,
        sampler.mark()              # the sampled step counts from the end of the one before
        ...
        jax.device_get(record)      # the loop's own wait for the step
        split = sampler.end()

    Calls come from one thread. Sample one step in many: on CPU `end` takes about 30 microseconds
    of CPU and 200 bytes of temporary file for each event, half of it JAX's own, and a step of the
    shipped small run on 8 simulated devices has 25,000 events. The step under the profiler itself
    takes 10 to 30% more CPU.
    """

    def __init__(self, programs: Iterable[str] = ()) -> None:
        """`programs`: the text of each compiled program that a step runs
        (`Compiled.as_text()`). Without it operations are told apart by their names alone."""
        self.reason: str | None = None
        """Why the last sample gave nothing; None when it gave something."""
        self.cost_s = 0.0
        """What `begin` and `end` of the last sample took, so that the caller can choose how many
        steps lie between samples."""
        self._texts: Sequence[str] = tuple(programs)
        self._programs: Sequence[Program] | None = None
        self._folder: str | None = None
        self._logged: set[str] = set()

    def begin(self) -> bool:
        """Start a sample; of one that has begun and not ended nothing is kept.

        Returns whether the profiler runs.
        """
        self.cost_s = 0.0
        if self._folder is not None:
            self._attempt(self._stop)
        self._attempt(self._start)
        return self._folder is not None

    def mark(self) -> None:
        """The step before has just ended: the sampled one counts from here."""
        if self._folder is not None:
            self._attempt(lambda: _mark(STEP_BEGINS))

    def end(self) -> DeviceSplit | None:
        """The split of the step that was dispatched after `begin` and is now complete.

        None when there is none; then `reason` says why, and is logged when it is new. Without a
        sample that has begun, None and nothing else.
        """
        return None if self._folder is None else self._attempt(self._read)

    def _start(self) -> None:
        options = ProfileOptions()
        options.host_tracer_level = 1  # operations on CPU, and our marks
        options.python_tracer_level = 0
        options.enable_hlo_proto = False
        options.raise_error_on_start_failure = True  # else a trace without devices
        folder = tempfile.mkdtemp(prefix="jaxrel-trace-")
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._folder = folder
        _mark(STEP_BEGINS)

    def _stop(self) -> Any:
        """The session's `ProfileData`. Its folder goes, whatever happens."""
        folder, self._folder = self._folder, None
        assert folder is not None
        try:
            jax.profiler.stop_trace()
            (file,) = Path(folder).rglob("*.xplane.pb")
            return ProfileData.from_file(str(file))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _read(self) -> DeviceSplit:
        _mark(STEP_ENDS)
        data = self._stop()
        if self._programs is None:
            self._programs = tuple(map(read_program, self._texts))
        with warnings.catch_warnings():
            # jaxlib's types of statistics warn when they are made, and abort where that is an error
            warnings.simplefilter("ignore")
            events = list(read_events(data))
        return split_step(read_trace(events, self._programs))

    def _attempt(self, act: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            result = act()
            self.reason = None
            return result
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
            if self.reason not in self._logged:
                self._logged.add(self.reason)
                log.warning("no device split of this step: %s", self.reason)
            return None
        finally:
            self.cost_s += time.perf_counter() - began


def profiled(act: Callable[[], object], programs: Iterable[str] = ()) -> DeviceSplit | str:
    """Run `act` once under the profiler and split what its devices did; else the reason, in words.

    `act` is one step that is compiled and waits for its result. It runs in any case, and what
    it raises is raised. `programs` as in `Sampler`.
    """
    sampler = Sampler(programs)
    sampler.begin()
    try:
        act()
    finally:
        split = sampler.end()
    return split or sampler.reason or "the profiler gave nothing"


def _mark(name: str) -> None:
    with TraceAnnotation(name):
        pass
