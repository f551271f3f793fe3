"""Runs that go on, again and again, on other devices, processes and axes: the same run.

Each chain is one run that is stopped after a few steps and started again on another mesh, several
times. For each start

- the state digest after the restore is that of the checkpoint, and the state restored onto the
  same mesh by `jaxrel.Checkpointer` here equals it, restored onto one device, bit for bit;
- the losses and gradient norms of the next steps, and the digests of the checkpoints, are exactly
  those of an undisturbed run on 8 devices, as long as only data and fsdp changed;
- once the tensor degree was another, each loss and gradient norm is within `TOLERANCE` of it,
  because the compiler then divides the sums of the matrix products otherwise.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from etils import epath

from jaxrel.checkpoint import Checkpointer, manifest
from jaxrel.checkpoint.listing import newest
from jaxrel.config import Config
from jaxrel.config_file import load
from jaxrel.events import Resumed, StepCompleted
from jaxrel.exit_codes import ExitCode, JaxrelError
from jaxrel.ledger.reader import read
from jaxrel.mesh.build import build_mesh, degrees
from jaxrel.train.run import make_step
from jaxrel.train.task import reference_task
from scripts.campaigns.results import once, state_folder, write_result
from scripts.campaigns.save_kills import bits
from scripts.campaigns.workers import ROOT, SMALL, Worker, final_digest, free_port

STEPS = 40
"""So many that a run is never finished before it is told to stop."""
RULES = {"heads": "tensor", "mlp": "tensor", "vocabulary": "tensor"}
"""The default without `kv_heads`, because the small model has one of them."""
LEG = 3
"""Steps that are shown before a start is told to stop."""
TOLERANCE = 1e-5
"""Relative, of a loss or a gradient norm, once the tensor degree changed."""


@dataclass(frozen=True)
class Leg:
    """A start of a chain: its processes, and the degrees of the mesh over all of them."""

    processes: int
    data: int
    fsdp: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        named = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        axes = " x ".join(f"{name} {n}" for name, n in named.items() if n > 1) or "1 device"
        return f"{axes} in {self.processes}" if self.processes > 1 else axes

    def flags(self) -> dict[str, Any]:
        """Of `jaxrel train`; each process simulates its share of the devices."""
        axes = {"mesh.data": self.data, "mesh.fsdp": self.fsdp, "mesh.tensor": self.tensor}
        devices = self.data * self.fsdp * self.tensor
        rules = {"mesh.rules": RULES} if self.tensor > 1 else {}
        return axes | {"mesh.cpu_devices": devices // self.processes} | rules


CHAINS = {
    "devices": [Leg(1, 8), Leg(1, 2, 2), Leg(1, 1, 2), Leg(1, 1), Leg(1, 4, 2), Leg(1, 1, 8)],
    "processes": [Leg(2, 4, 2), Leg(1, 8), Leg(4, 1, 8)],
    "tensor": [Leg(1, 8), Leg(1, 2, 2, 2), Leg(1, 4, 2), Leg(1, 2, 2, 2)],
}


def undisturbed(folder: Path, cache: Path) -> dict[str, Any]:
    """What comes of a run on 8 devices that nobody touches and that saves every step."""
    run = folder / "run"
    start(run, Leg(1, 8), {"run.steps": STEPS, "checkpoint.interval": 1}, cache)
    return history(run)


def history(run: Path) -> dict[str, Any]:
    """Of a run that was only ever stopped: [step, loss, gradient norm] of each step, and digests.

    The digests are [step, digest] of its checkpoints, from their manifests.
    """
    events = [record.event for record in read(run).records]
    done = [[e.step, e.loss, e.grad_norm] for e in events if isinstance(e, StepCompleted)]
    saved = sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdecimal())
    return {"steps": done, "digests": [[step, _digest(run, step)] for step in saved]}


def carry_out(legs: Sequence[Leg], folder: Path, cache: Path, steps: int = STEPS) -> dict[str, Any]:
    """Start one run on each of `legs` in turn, the last one to its end; what came of it."""
    run, starts = folder / "run", []
    flags = {"run.steps": steps}
    for leg in legs:
        step = newest(run / "checkpoints") or 0
        bad = restored_here(run, step, leg, flags) if step else ""
        stop_at = None if len(starts) == len(legs) - 1 else step + LEG
        lines = start(run, leg, flags, cache, stop_at)
        starts.append({"leg": str(leg), "step": step, "restored_here": bad, "last_line": lines[-1]})
    for begun, resumed in zip(starts, _resumed(run), strict=True):
        step = begun["step"]
        begun |= {
            "saved_digest": _digest(run, step) if step else None,
            "resumed": [resumed.step, resumed.devices, resumed.processes, resumed.degrees],
            "resumed_digest": resumed.state_digest,
        }
    final = final_digest([starts[-1]["last_line"]])
    return {"starts": starts, "final_digest": final, **history(run)}


def start(
    run: Path, leg: Leg, flags: Mapping[str, Any], cache: Path, stop_at: int | None = None
) -> list[str]:
    """Run the processes of `leg`, until step `stop_at` is shown or to the end.

    Returns the lines of process 0.
    """
    flags, own = {**flags, **leg.flags()}, [{}]
    if leg.processes > 1:
        job = {"job.coordinator": f"127.0.0.1:{free_port()}", "job.num_processes": leg.processes}
        own = [{**job, "job.process_id": process} for process in range(leg.processes)]
    workers = [Worker(run, {**flags, **mine}, cache=cache) for mine in own]
    try:
        if stop_at is not None:
            workers[0].wait_for(rf"^step {stop_at}/")
            workers[0].process.terminate()
        expected = ExitCode.OK if stop_at is None else ExitCode.PREEMPTED
        for worker in workers:
            assert worker.finish() == expected, worker.lines
    finally:
        for worker in workers:
            worker.kill()
    return workers[0].lines


def restored_here(run: Path, step: int, leg: Leg, flags: Mapping[str, Any]) -> str:
    """What is wrong when this process restores `step` onto the mesh of `leg`; "" if nothing is."""
    checkpointer = Checkpointer(run / "checkpoints")
    try:
        onto, found = checkpointer.restore(_template(leg, flags), step)
        alone, _ = checkpointer.restore(_template(Leg(1, 1), flags), step)
    except JaxrelError as error:
        return str(error)
    if (found["step"], int(onto.step)) != (step, step):
        return f"it is step {int(onto.step)}, of the checkpoint of step {found['step']}"
    return "" if bits(onto) == bits(alone) else "other bits than on one device"


def judge(found: Mapping[str, Any], legs: Sequence[Leg], reference: Mapping[str, Any]) -> list[str]:
    """What is wrong with a chain; [] when it went on each time as if nothing had changed."""
    starts, exact = found["starts"], exact_steps(found, legs)
    losses = dict(_by_step(reference["steps"]))
    digests = dict(reference["digests"])
    checks = {
        "digest after a restore": all(s["resumed_digest"] == s["saved_digest"] for s in starts),
        "step or mesh of a start": [s["resumed"] for s in starts] == _expected(starts, legs),
        "bits of a restore": not any(s["restored_here"] for s in starts),
        "each step once": [step for step, *_ in found["steps"]] == sorted(losses),
        "exact loss or norm": all(
            losses[step] == own for step, own in _by_step(found["steps"]) if step <= exact
        ),
        "exact digest": all(
            digests.get(step, own) == own for step, own in found["digests"] if step <= exact
        ),
        "loss or norm within the tolerance": deviation(found, reference) <= TOLERANCE,
    }
    return [name for name, right in checks.items() if not right]


def exact_steps(found: Mapping[str, Any], legs: Sequence[Leg]) -> int:
    """The last step before the tensor degree changed."""
    changed = (s["step"] for s, leg in zip(found["starts"], legs, strict=True) if leg.tensor > 1)
    return next(changed, found["steps"][-1][0])


def deviation(found: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """The largest relative difference of a loss or gradient norm."""
    theirs = dict(_by_step(reference["steps"]))
    pairs = [
        (mine, other)
        for step, own in _by_step(found["steps"])
        for mine, other in zip(own, theirs[step], strict=True)
    ]
    return max(abs(mine - other) / abs(other) for mine, other in pairs)


def _by_step(rows: Sequence[Sequence[Any]]) -> list[tuple[int, list[float]]]:
    return [(step, values) for step, *values in rows]


def _expected(starts: Sequence[Mapping[str, Any]], legs: Sequence[Leg]) -> list[list[Any]]:
    """What each start must have put on record: step, devices, processes, degrees."""
    rows = []
    for begun, leg in zip(starts, legs, strict=True):
        axes = {"data": leg.data, "fsdp": leg.fsdp, "tensor": leg.tensor}
        rows.append([begun["step"], leg.data * leg.fsdp * leg.tensor, leg.processes, axes])
    return rows


def _resumed(run: Path) -> list[Resumed]:
    """Process 0's, in order."""
    records = [record for record in read(run).records if record.source == "rank0"]
    return [record.event for record in records if isinstance(record.event, Resumed)]


def _digest(run: Path, step: int) -> str:
    return manifest.read(epath.Path(run / "checkpoints" / str(step)))["state_digest"]


def _template(leg: Leg, flags: Mapping[str, Any]) -> Any:
    """The abstract state on the mesh of `leg`, over devices of this process."""
    config = load(ROOT / "scripts/configs/tiny.yaml")
    for key, value in {**SMALL, **flags, **leg.flags()}.items():
        config = _with(config, key, value)
    devices = jax.devices()[: leg.data * leg.fsdp * leg.tensor]
    mesh = build_mesh(degrees(config.mesh), devices)
    return make_step(config, reference_task(config), mesh).abstract_state


def _with(config: Config, key: str, value: Any) -> Config:
    section, name = key.split(".")
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


def main() -> int:
    """Run the campaign; exit 0 only if every chain went on as promised."""
    parser = argparse.ArgumentParser(
        prog="scripts/campaign reshape", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--dir", type=Path, help="where the runs go, and are found again")
    folder = parser.parse_args().dir or state_folder("reshape")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    cache = folder / "compiled"
    reference = once(folder / "undisturbed", partial(undisturbed, cache=cache))
    rows = {}
    for name, legs in CHAINS.items():
        found = once(folder / name, partial(carry_out, legs, cache=cache))
        wrong = judge(found, legs, reference)
        exact, far = exact_steps(found, legs), deviation(found, reference)
        print(f"{name}: {' -> '.join(map(str, legs))}")
        after = "" if exact == STEPS else f", then within {far:.1e}"
        told = f"wrong: {', '.join(wrong)}" if wrong else "as promised"
        print(f"    exact up to step {exact} of {STEPS}{after}: {told}", flush=True)
        rows[name] = {
            "starts": found["starts"],
            "exact_up_to": exact,
            "deviation": far,
            "final_digest": found["final_digest"],
            "wrong": wrong,
        }
    ok = not any(row["wrong"] for row in rows.values())
    result = {"ok": ok, "steps": STEPS, "tolerance": TOLERANCE, "chains": rows}
    print(f"written: {write_result('reshape', 0, result)}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
