"""What a local checkpoint costs beside a durable one, of the same state.

    python -m benchmarks.local_tier --local /dev/shm --out benchmarks/results/NAME.json
    python -m benchmarks.local_tier --quick

One process with eight simulated devices. Each round saves to both tiers in random order, and
once more to the local one as a control, each alone; then restores from each. Nothing that the
durable tier does after its commit (reading back) is running meanwhile.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks import checkpoint_arms as arms
from benchmarks.step_overhead import about_this_run
from benchmarks.verdict import paired_ratio
from jaxrel.checkpoint import Checkpointer
from jaxrel.mesh.join import use_cpu_devices

DURABLE, LOCAL, AGAIN = "durable", "local", "local again"
KEYS = ("blocking_s", "complete_s", "restore_s")


def measure(arm: str, state: Any, durable: Path, local: Path) -> dict[str, float]:
    """One save that nothing precedes, until it is complete, and its restore by a new job."""
    checkpointer = Checkpointer(durable, verify_mb_s=0, local_dir=local)
    assert checkpointer.local is not None
    began = time.perf_counter()
    if arm == DURABLE:
        checkpointer.save(1, state)
    else:
        checkpointer.save_local(1, state)
    blocked = time.perf_counter()
    checkpointer.wait()
    checkpointer.local.wait()
    complete = time.perf_counter()
    again = Checkpointer(durable, local_dir=local)
    restored, found = jax.block_until_ready(again.restore(arms.abstract(state)))
    ended = time.perf_counter()
    assert found["step"] == 1 and jax.tree.structure(restored) == jax.tree.structure(state)
    for folder in (durable, local):
        shutil.rmtree(folder, ignore_errors=True)
    times = (blocked - began, complete - began, ended - complete)
    return dict(zip(KEYS, times, strict=True))


def compare(state: Any, rounds: int, durable: Path, local: Path) -> dict[str, Any]:
    """Every round of every arm, and the ratios to the durable tier."""
    order = random.Random(0)
    found: list[dict[str, dict[str, float]]] = []
    for number in range(rounds + 1):
        shuffled = order.sample((DURABLE, LOCAL, AGAIN), 3)
        one = {arm: measure(arm, state, durable, local) for arm in shuffled}
        found += [one] if number else []  # the first pays for compilation
    ratios = {}
    for key in KEYS:
        by_arm = {arm: [one[arm][key] for one in found] for arm in (DURABLE, LOCAL, AGAIN)}
        ratio = paired_ratio(by_arm[LOCAL], by_arm[DURABLE])
        control = paired_ratio(by_arm[AGAIN], by_arm[LOCAL])
        ratios[key] = {"local / durable": str(ratio), "A/A": str(control)}
        middle = {arm: sorted(values)[len(values) // 2] for arm, values in by_arm.items()}
        print(f"{key:12} local / durable {ratio}  A/A {control}  ", end="")
        print("  ".join(f"{arm} {value:.3f} s" for arm, value in middle.items()))
    return {"rounds": found, "ratios": ratios}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local_tier")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of state, at least")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--local", type=Path, default=Path("/dev/shm"), help="the local disk")
    parser.add_argument("--durable", type=Path, help="the durable one; by default for temporaries")
    parser.add_argument("--quick", action="store_true", help="a tiny smoke, not a measurement")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    use_cpu_devices(arms.DEVICES)
    state = arms.make_state(arms.Size.of(given.gigabytes, given.quick))
    with (
        tempfile.TemporaryDirectory(prefix="durable-", dir=given.durable) as durable,
        tempfile.TemporaryDirectory(prefix="local-", dir=given.local) as local,
    ):
        rounds = 2 if given.quick else given.rounds
        found = compare(state, rounds, Path(durable, "c"), Path(local, "c"))
    found |= {"state_bytes": sum(x.nbytes for x in jax.tree.leaves(state))}
    found |= about_this_run([*parser.prog.split(), *sys.argv[1:]])
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
