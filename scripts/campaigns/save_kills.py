"""SIGKILL at random moments of a save: there is always a good checkpoint, and never a leftover.

A process saves every step and is killed in one of its saves. The moments take turns:

- `time`: a random share of the time that a save takes, from its call to the end of retention;
- `bytes`: when a random share of the bytes is in the temporary directory;
- `operation`: before a random one of the save's file operations in Python, in their order: the
  directories that it makes, the commit's rename, retention's rename and each deletion.

After each kill every good checkpoint is restored on another mesh and compared bit for bit. Then

- the newest is not older than the newest that was complete before the save began;
- there are at least two, and nothing that bears a step's number alone is not good.

The next process goes on in the same directory; after each of its saves there are exactly as many
checkpoints as are kept, and nothing else.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrel.checkpoint import Checkpointer, listing
from jaxrel.exit_codes import JaxrelError
from scripts.campaigns.results import write_result
from scripts.campaigns.workers import ROOT, Worker

KEEPS = (2, 3)
MOMENTS = ("time", "bytes", "operation")
SAVED_ON, RESTORED_ON = 4, 2  # devices
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
"""Python's audit events that a save can be killed at."""
IDLE_S = 60  # what a process waits for its killer after its last save


@dataclass(frozen=True)
class Trial:
    """One kill; all of it drawn from the seed."""

    number: int
    keep: int
    moment: str
    nth: int
    """Which save of its process, from 1: the first one also sweeps what the last kill left."""
    fraction: float
    """How far into the save, 0 to 1."""


@dataclass
class Look:
    """What a directory holds after a kill."""

    good: list[int]
    """Steps, rising."""
    bad: list[str]
    """What bears a step's number alone and is not good, and what could not be restored."""
    newest: int | None
    """The step that a restore takes, proven to be right."""


@dataclass
class Outcome:
    """What came of a trial."""

    trial: Trial
    step: int
    """Whose save was cut."""
    before: int
    """Newest complete step before that save."""
    found: str
    """How far the save had come."""
    look: Look
    left: list[list[str]]
    """Names in the directory after each save of this process before that one."""


def draw(seed: int, count: int) -> list[Trial]:
    """The first `count` trials of a seed; what is kept and the moments take turns."""
    rng, trials = random.Random(seed), []
    for number in range(count):
        moment, keep = MOMENTS[number // len(KEEPS) % len(MOMENTS)], KEEPS[number % len(KEEPS)]
        trials.append(Trial(number, keep, moment, rng.randint(1, 3), rng.random()))
    return trials


# The process that saves


def state(step: int, devices: int) -> dict[str, jax.Array]:
    """A function of the step alone: some megabytes, quick to make and slow to write."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    rng = np.random.default_rng(step)
    split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("data"), PartitionSpec()))
    leaves = {f"w{i}": rng.standard_normal((64, 4096), dtype=np.float32) for i in range(6)}
    placed = {name: jax.device_put(leaf, split) for name, leaf in leaves.items()}
    return placed | {"step": jax.device_put(np.int32(step), whole)}


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of each leaf: equal for two trees that are the same bits."""
    keys = jax.dtypes.prng_key
    plain = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x
        for x in jax.tree.leaves(tree)
    ]
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in plain]


class Operations:
    """Counts this process's file operations, and kills it before one of them if told to."""

    def __init__(self) -> None:
        self.begin()
        sys.addaudithook(self._hear)

    def begin(self, fatal: int | None = None) -> None:
        """Count from 0; die before operation `fatal`."""
        self.count, self._fatal = 0, fatal

    def _hear(self, event: str, _: Any) -> None:
        # What is read back in the background, in its own time, is no part of a save.
        if event in OPERATIONS and threading.current_thread().name != "verify":
            if self.count == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1


def saves(directory: str, keep: int, count: int, fatal: int | None, stay: bool) -> None:
    """Save `count` steps after the newest, and say what happens; `fatal` is of the last one."""
    jax.config.update("jax_num_cpu_devices", SAVED_ON)
    say(pid=os.getpid())
    operations = Operations()
    with Checkpointer(directory, keep=keep) as checkpointer:
        newest = checkpointer.latest() or 0
        for step in range(newest + 1, newest + count + 1):
            now = state(step, SAVED_ON)
            operations.begin(fatal if step == newest + count else None)
            say(saving=step)
            began = time.monotonic()
            checkpointer.save(step, now)
            checkpointer.wait()
            took_s = time.monotonic() - began
            say(saved=step, took_s=took_s, operations=operations.count, left=os.listdir(directory))
        if fatal is not None:  # it took fewer operations than usual
            os.kill(os.getpid(), signal.SIGKILL)
        if stay:
            time.sleep(IDLE_S)


def nursery() -> None:
    """Fork a process that runs `saves` for each line of standard input, one after the other.

    A fork of a process that has imported JAX, but not started it, spares the imports.
    """
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            try:
                saves(**json.loads(line))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        say(ended=os.waitstatus_to_exitcode(status))


def say(**what: Any) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(what), flush=True)


# The one that kills


class Saver:
    """Starts processes that save into one directory, one at a time, and hears them."""

    def __init__(self, directory: Path, keep: int, log: Path) -> None:
        self.directory, self.keep = directory, keep
        self.complete = 0
        """Newest step that is known to be complete."""
        self.usual: list[dict[str, Any]] = [{}, {}]
        """What the last complete save said: a process's first one, and a later one."""
        self.left: list[list[str]] = []
        """Names in the directory after each save of the process."""
        with log.open("a") as errors:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "scripts.campaigns.save_kills", "--nursery"],
                cwd=ROOT,
                env=Worker.environment(log.with_name("compiled")),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def close(self) -> None:
        """End it; a process that has not ended does so by itself."""
        self._nursery.kill()
        with self._nursery:
            pass

    def start(self, count: int, fatal: int | None = None, stay: bool = False) -> int:
        """Start a process of `count` saves; returns its id."""
        assert self._nursery.stdin is not None
        self.left = []
        order = {"directory": str(self.directory), "keep": self.keep, "count": count}
        self._nursery.stdin.write(json.dumps(order | {"fatal": fatal, "stay": stay}) + "\n")
        self._nursery.stdin.flush()
        return self.hear("pid")

    def hear(self, what: str) -> Any:
        """Go on until the process says `what`. Raises AssertionError when it ended before."""
        assert self._nursery.stdout is not None
        for line in self._nursery.stdout:
            said = json.loads(line) if line.startswith("{") else {}
            if "saved" in said:
                self.complete = said["saved"]
                self.usual[bool(self.left)] = said
                self.left.append(sorted(said["left"]))
            if what in said:
                return said[what]
            assert "ended" not in said, f"ended with {said['ended']} before {what}"
        raise AssertionError(f"the processes are gone before {what}")


def carry_out(trials: Sequence[Trial], folder: Path) -> Iterator[Outcome]:
    """The outcome of each trial, those of one `keep` after the other in one directory.

    Raises AssertionError when one more start and save at the end leaves anything behind.
    """
    for keep in sorted({trial.keep for trial in trials}):
        directory = folder / f"keep-{keep}"
        with closing(Saver(directory, keep, folder / "log")) as saver:
            saver.start(keep + 1)  # as many as are kept, and one that was deleted
            assert saver.hear("ended") == 0
            for trial in trials:
                if trial.keep == keep:
                    yield kill(trial, saver)
            saver.start(1)
            assert saver.hear("ended") == 0
            assert clean(saver.left[0], keep), saver.left


def kill(trial: Trial, saver: Saver) -> Outcome:
    """Start a process, kill it at the trial's moment, and look at what is left."""
    before = _names(saver.directory)
    size = _bytes(saver.directory / str(saver.complete))
    usual, operation = saver.usual[trial.nth > 1], trial.moment == "operation"
    fatal = int(trial.fraction * usual["operations"]) if operation else None
    process, step = saver.start(trial.nth, fatal, stay=not operation), 0
    for _ in range(trial.nth):
        step = saver.hear("saving")
    complete, left = saver.complete, list(saver.left)
    if trial.moment == "time":
        time.sleep(trial.fraction * usual["took_s"])
    elif trial.moment == "bytes":
        _wait_for_bytes(saver.directory, step, before, trial.fraction * size)
    if not operation:
        os.kill(process, signal.SIGKILL)
    assert saver.hear("ended") == -signal.SIGKILL
    found, seen = progress(saver.directory, step, before, saver.keep), look(saver.directory)
    saver.complete = seen.newest or 0
    return Outcome(trial, step, complete, found, seen, left)


def look(directory: Path) -> Look:
    """Restore every good checkpoint on another mesh and compare it with what was saved."""
    entries = listing.scan(directory)
    good = [entry.step for entry in entries if entry.good]
    spoilt = (e for e in entries if e.path.name.isdecimal() and not e.good)
    bad = [f"{e.step}: {e.status} {e.why}" for e in spoilt]
    newest, now = None, state(0, RESTORED_ON)
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in now.items()
    }
    for step in (None, *good):
        try:
            restored, manifest = Checkpointer(directory).restore(abstract, step)
        except JaxrelError as error:
            bad.append(f"{step or 'the newest'}: {error}")
            continue
        if bits(restored) != bits(state(manifest["step"], RESTORED_ON)):
            bad.append(f"{step or 'the newest'}: restored as step {manifest['step']}, other bits")
        elif step is None:
            newest = manifest["step"]
    return Look(good, bad, newest)


def progress(directory: Path, step: int, before: set[str], keep: int) -> str:
    """How far the save of `step` had come when the process died."""
    names = _names(directory)
    if str(step) in names:
        if any(name.endswith("-old") for name in names):
            return "deleting an older one"
        complete = sum(name.isdecimal() for name in names)
        return "committed, nothing deleted yet" if complete > keep else "all done"
    return "writing" if any(n.startswith(f"{step}.") for n in names - before) else "not on disk"


def judge(outcome: Outcome) -> list[str]:
    """What is wrong with a trial; [] when nothing was lost and nothing was left."""
    seen, keep = outcome.look, outcome.trial.keep
    checks = {
        "older than before": seen.newest is not None and seen.newest >= outcome.before,
        "not the newest good one": seen.newest == max(seen.good, default=None),
        "not good": not seen.bad,
        "fewer than two good ones": len(seen.good) >= 2,
        "left over": all(clean(names, keep) for names in outcome.left),
    }
    return [name for name, right in checks.items() if not right]


def clean(names: Sequence[str], keep: int) -> bool:
    """Whether a directory holds as many steps as are kept, and nothing else."""
    return len(names) == keep and all(name.isdecimal() for name in names)


def _wait_for_bytes(directory: Path, step: int, before: set[str], limit: float) -> None:
    """Until that many bytes are in the temporary directory of `step`, or it is committed."""
    ends = time.monotonic() + IDLE_S
    while str(step) not in (names := _names(directory)) and time.monotonic() < ends:
        own = (name for name in names - before if name.startswith(f"{step}."))
        if sum(_bytes(directory / name) for name in own) >= limit:
            return
        time.sleep(0.0002)


def _names(directory: Path) -> set[str]:
    return set(os.listdir(directory))


def _bytes(folder: Path) -> int:
    """Of all files below; one that vanishes meanwhile counts as none."""
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(path, name)).st_size
    return total


def main() -> int:
    """Run the campaign; exit 0 only if nothing was lost and nothing was left."""
    parser = argparse.ArgumentParser(
        prog="scripts/campaign save-kills", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=60, help="trials")
    parser.add_argument("--seed", type=int, default=0, help="what is killed when")
    parser.add_argument("--nursery", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.nursery:
        nursery()
        return 0
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RESTORED_ON)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for outcome in carry_out(draw(args.seed, args.count), Path(folder)):
            trial, wrong = outcome.trial, judge(outcome)
            rows.append(asdict(outcome) | {"wrong": wrong})
            print(
                f"{len(rows):>3}/{args.count}  keep {trial.keep}  save {trial.nth} of its process,"
                f" by {trial.moment:<9}  {outcome.found:<30}  good {outcome.look.good}"
                f"{'  wrong: ' + ', '.join(wrong) if wrong else ''}",
                flush=True,
            )
    found = Counter(row["found"] for row in rows)
    print("\n".join(f"{count:5}  {name}" for name, count in found.most_common()))
    wrong = sum(bool(row["wrong"]) for row in rows)
    fewest = min((len(row["look"]["good"]) for row in rows), default=0)
    result = {"ok": not wrong, "fewest_good": fewest, "found": dict(found), "trials": rows}
    print(f"{len(rows)} kills, {wrong} not as promised; never fewer than {fewest} good ones")
    print(f"written: {write_result('save-kills', args.seed, result)}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
