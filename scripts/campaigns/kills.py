"""SIGKILL at random moments, each resumed on a random device count: the same bits at the end.

For each trial a run is killed (in a step, in a save, in start-up, or in the start-up of a
resume) and started again on another number of devices until it is finished. Then

- its final digest, and that of every checkpoint on the way, equal an undisturbed run's;
- the batches of its final lineage, from the record of what each process read, are exactly
  those of steps 0 to N - 1, each once: an attempt counts from the step that it resumed from
  up to the step that the next one resumed from.

The undisturbed run reads the corpus itself and the killed ones read it through a recording
pipeline, so the two ways must also agree on what a batch is.
"""

import argparse
import random
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from etils import epath

from jaxrel.checkpoint import manifest
from jaxrel.checkpoint.listing import TMP_SUFFIX, newest
from scripts.campaigns.recorded import expected, reads
from scripts.campaigns.results import once, state_folder, write_result
from scripts.campaigns.workers import SMALL, Worker, final_digest

MOMENTS = ("step", "save", "start-up", "start-up of a resume")
DEVICES = (1, 2, 4, 8)
STEPS, INTERVAL = SMALL["run.steps"], SMALL["checkpoint.interval"]
GROUPS = 8
PIPELINE = "scripts.campaigns.recorded:batches"
START_UP_S, STEP_S, SAVE_S = 2.5, 0.03, 0.06
"""About how long each takes: the range in which a moment is drawn."""


@dataclass(frozen=True)
class Trial:
    """What is done to one run; all of it drawn from the seed."""

    number: int
    moment: str
    devices: tuple[int, ...]
    """Of each attempt; all but the last are killed."""
    at_step: int
    """Killed after this step is shown, or in this step's save."""
    fraction: float
    """Where in the step, save or start-up, 0 to 1."""


@dataclass
class Attempt:
    """What one process did."""

    process: int
    devices: int
    start: int
    """Newest checkpoint when it started; 0 if there was none."""
    killed: str | None
    """At what; None for the one that finished."""
    lines: list[str]


def draw(seed: int, count: int) -> list[Trial]:
    """The first `count` trials of a seed; the moments take turns."""
    rng, trials = random.Random(seed), []
    for number in range(count):
        moment = MOMENTS[number % len(MOMENTS)]
        attempts = 3 if moment == "start-up of a resume" else 2
        devices = tuple(rng.choice(DEVICES) for _ in range(attempts))
        at_step = rng.randrange(INTERVAL + 1 if attempts == 3 else 1, STEPS)
        if moment == "save":
            at_step = rng.randrange(INTERVAL, STEPS + 1, INTERVAL)
        trials.append(Trial(number, moment, devices, at_step, rng.random()))
    return trials


def undisturbed(folder: Path, cache: Path) -> dict[str, Any]:
    """What comes of a run on 8 devices that nobody touches, from the corpus itself."""
    run = folder / "run"
    worker = Worker(run, {"mesh.cpu_devices": 8}, cache=cache)
    assert worker.finish() == 0, worker.lines
    return outcome(run, [Attempt(worker.process.pid, 8, 0, None, worker.lines)])


def carry_out(trial: Trial, folder: Path, cache: Path) -> dict[str, Any]:
    """Do `trial` in `folder`, and say what came of it."""
    run, log = folder / "run", folder / "reads"
    attempts: list[Attempt] = []
    for devices in trial.devices:
        start = newest(run / "checkpoints") or 0
        flags = {"data.pipeline": PIPELINE, "mesh.cpu_devices": devices}
        worker = Worker(run, flags, cache=cache, environment={"CAMPAIGN_READS": str(log)})
        left = len(trial.devices) - len(attempts) - 1  # attempts after this one
        killed = _kill("step" if left == 2 else trial.moment, trial, worker, run) if left else None
        code = worker.finish()
        assert code == (-signal.SIGKILL if killed else 0), (code, worker.lines)
        attempts.append(Attempt(worker.process.pid, devices, start, killed, worker.lines))
    return outcome(run, attempts) | {"batches": batches(attempts, log)}


def outcome(run: Path, attempts: list[Attempt]) -> dict[str, Any]:
    """Of a finished run: its digests and data positions by step, its progress by lineage."""
    steps = range(INTERVAL, STEPS + 1, INTERVAL)
    found = [manifest.read(epath.Path(run / "checkpoints" / str(step))) for step in steps]
    progress = []
    for attempt, own in lineage(attempts):
        text = "\n".join(attempt.lines)
        shown = dict(re.findall(r"^step (\d+)/\d+  (loss \S+  grad norm \S+)", text, re.MULTILINE))
        progress += [shown.get(str(step + 1)) for step in own]
        resumed = [
            int(step) for step in re.findall(r"^resumed from step (\d+)", text, re.MULTILINE)
        ]
        assert resumed in ([], [attempt.start]), attempt
    return {
        "final_digest": final_digest(attempts[-1].lines),
        "digests": [m["state_digest"] for m in found],
        "positions": [m["extra"]["position"]["position"] for m in found],
        "progress": progress,
        "attempts": attempts,
    }


def lineage(attempts: list[Attempt]) -> list[tuple[Attempt, range]]:
    """The steps, counted from 0, that each attempt gave to the finished run."""
    ends = [attempt.start for attempt in attempts[1:]] + [STEPS]
    return [(a, range(a.start, end)) for a, end in zip(attempts, ends, strict=True)]


def batches(attempts: list[Attempt], log: Path) -> list[list[str | None]]:
    """Token hash of each group of the batches that the finished run is made of, in order."""
    table = []
    for attempt, own in lineage(attempts):
        shards = reads(log, attempt.process, GROUPS)
        for shard in shards:  # nothing from before its start, nothing left out
            assert sorted(shard) == list(range(attempt.start, attempt.start + len(shard)))
        table += [[shard.get(step) for shard in shards] for step in own]
    return table


def judge(found: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """What is wrong with a trial; [] when the run ended as if nobody had touched it."""
    checks = {
        "final digest": found["final_digest"] == reference["final_digest"],
        "digest of a checkpoint": found["digests"] == reference["digests"],
        "data position": found["positions"] == list(range(INTERVAL, STEPS + 1, INTERVAL)),
        "loss of a step": found["progress"] == reference["progress"] and all(found["progress"]),
        "batches consumed": found["batches"] == ordered_batches(),
    }
    return [name for name, right in checks.items() if not right]


@cache
def ordered_batches() -> list[list[str]]:
    """What `batches` must be, from the definition of the order."""
    batch, sequence = SMALL["batch.global_size"], SMALL["batch.sequence"]
    return expected(STEPS, batch=batch, sequence=sequence, groups=GROUPS, seed=0)


def _kill(moment: str, trial: Trial, worker: Worker, run: Path) -> str:
    """Kill `worker` at the moment, and say what it was."""
    step = trial.at_step
    if moment == "step":
        worker.wait_for(rf"^step {step}/")
        time.sleep(trial.fraction * STEP_S)
        worker.kill()
        return f"in a step, after step {step} was shown"
    if moment == "save":
        temporary = f"{step}{TMP_SUFFIX}*"
        while not any((run / "checkpoints").glob(temporary)):
            assert worker.process.poll() is None, worker.lines
            time.sleep(0.001)
        time.sleep(trial.fraction * SAVE_S)
        worker.kill()
        cut = any((run / "checkpoints").glob(temporary))
        return f"{'in' if cut else 'just after'} the save of step {step}"
    seconds = trial.fraction * START_UP_S
    time.sleep(seconds)
    worker.kill()
    return f"{seconds:.2f} s after the start"


def main() -> int:
    """Run the campaign; exit 0 only if every trial ended in the same bits."""
    parser = argparse.ArgumentParser(prog="scripts/campaign kills", description=__doc__)
    parser.add_argument("--count", type=int, default=12, help="trials")
    parser.add_argument("--seed", type=int, default=0, help="what is killed when")
    parser.add_argument("--dir", type=Path, help="where the runs go, and are found again")
    args = parser.parse_args()
    folder = args.dir or state_folder(f"kills-seed{args.seed}")
    cache = folder / "compiled"
    reference = once(folder / "undisturbed", lambda own: undisturbed(own, cache))
    rows = []
    for trial in draw(args.seed, args.count):
        found = once(folder / f"trial-{trial.number}", partial(carry_out, trial, cache=cache))
        wrong = judge(found, reference)
        attempts = [{k: a[k] for k in ("devices", "start", "killed")} for a in found["attempts"]]
        digest = found["final_digest"]
        rows.append({**asdict(trial), "attempts": attempts, "final_digest": digest, "wrong": wrong})
        killed = ", ".join(a["killed"] for a in attempts if a["killed"])
        then = f"{' -> '.join(map(str, trial.devices))} devices"
        print(
            f"{trial.number + 1:>3}/{args.count}  {then:<22}  killed {killed}: "
            f"{'wrong: ' + ', '.join(wrong) if wrong else 'same bits, each batch once'}",
            flush=True,
        )
    ok = not any(row["wrong"] for row in rows)
    result = {
        "steps": STEPS, "interval": INTERVAL, "undisturbed_digest": reference["final_digest"],
        "ok": ok, "trials": rows,
    }  # fmt: skip
    print(f"written: {write_result('kills', args.seed, result)}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
