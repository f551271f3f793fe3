"""Peak memory of checkpoints, each measured in a fresh process, and memory that grows by save.

The kernel keeps the high-water mark of resident memory and resets it on request
(`/proc/self/clear_refs`), so that building the state does not count.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
WARM_UP = 0.2
"""Share of the saves after which memory is expected to be flat."""
SLOPE_BAR_MB, VERIFY_BAR_MB = 1.0, 500.0
_LIMIT_S = 900.0


@dataclass(frozen=True)
class Slope:
    """MB a save, by least squares, and its 95% interval (1.96 standard errors)."""

    median: float
    low: float
    high: float
    verdict: str


def resident() -> dict[str, float]:
    """Resident memory of this process and its high-water mark, in MB (1e6 bytes)."""
    fields = dict(x.split(":") for x in Path("/proc/self/status").read_text().splitlines())
    kilobytes = {name: int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM")}
    return {name: count * 1024 / 1e6 for name, count in kilobytes.items()}


def reset_peak() -> None:
    """Let the high-water mark start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def in_fresh_process(task: str, *args: Any) -> Any:
    """What a task of this module finds in a new process. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "benchmarks.checkpoint_memory", task, json.dumps(args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{task} {args} left with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def save_peak(arm: str, hidden: int, layers: int) -> dict[str, float]:
    """Peak of the first save of a process, and how much of it came on top of the state."""
    from benchmarks import checkpoint_arms as arms

    state = arms.make_state(arms.Size(hidden, layers))
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        reset_peak()
        before = resident()["VmRSS"]
        with arms.opened(Path(folder), arm, state) as way:
            way.save(state)
            way.wait()
            peak = resident()["VmHWM"]
    return {"peak_mb": peak, "added_mb": peak - before}


def restore_peak(arm: str, hidden: int, layers: int, folder: str) -> dict[str, float]:
    """Peak of a restore in a process that had no state, and how much it added."""
    import jax

    from benchmarks import checkpoint_arms as arms

    with arms.opened(Path(folder), arm) as way:
        wanted = abstract_state(hidden, layers)
        reset_peak()
        before = resident()["VmRSS"]
        jax.block_until_ready(way.restore(wanted))
        peak = resident()["VmHWM"]
    return {"peak_mb": peak, "added_mb": peak - before}


def abstract_state(hidden: int, layers: int) -> Any:
    """Shapes, dtypes and shardings of a state that is not built."""
    import jax

    from benchmarks import checkpoint_arms as arms

    # A tiny state has the same names, dtypes and shardings.
    tiny = arms.abstract(arms.make_state(arms.Size(arms.DEVICES, layers)))
    factor = hidden // arms.DEVICES
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            tuple(n * factor for n in x.shape), x.dtype, sharding=x.sharding
        ),
        tiny,
    )


def many_saves(ours: bool, saves: int, megabytes: float) -> list[float]:
    """Resident MB after each of `saves` saves of one state, each waited for."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    from jaxrel.checkpoint import Checkpointer

    count = max(1, int(megabytes * 1e6 / 4 / 8))
    state = {str(n): jnp.full((count,), n, jnp.float32) for n in range(8)}
    found = []
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        if ours:
            way: Any = Checkpointer(folder)
        else:
            options = ocp.CheckpointManagerOptions(max_to_keep=3)
            way = ocp.CheckpointManager(folder, options=options)
        for step in range(saves):
            state = jax.tree.map(lambda x: x + 1, state)
            if ours:
                way.save(step, state)
                way.wait()
            else:
                way.save(step, args=ocp.args.StandardSave(state))
                way.wait_until_finished()
            found.append(resident()["VmRSS"])
        way.close()
    return found


def slope(megabytes: Sequence[float], warm_up: float = WARM_UP) -> Slope:
    """How fast memory grows after the warm-up, and whether that is below SLOPE_BAR_MB.

    Slope and standard error are those of ordinary least squares. `undecided` where the bar lies
    within the interval, or where fewer than ten saves are left.
    """
    y = np.asarray(megabytes[int(len(megabytes) * warm_up) :])
    if len(y) < 3:
        return Slope(float("nan"), float("nan"), float("nan"), "undecided")
    x = np.arange(len(y)) - (len(y) - 1) / 2
    found = float(x @ y / (x @ x))
    rest = y - y.mean() - found * x
    error = 1.96 * float(np.sqrt(rest @ rest / (len(y) - 2) / (x @ x)))
    low, high = found - error, found + error
    judged = "met" if high < SLOPE_BAR_MB else "not met" if low > SLOPE_BAR_MB else "undecided"
    return Slope(found, low, high, judged if len(y) >= 10 else "undecided")


def make_large(folder: str, megabytes: float) -> None:
    """A checkpoint of `megabytes`, half of them in one leaf and the rest in four."""
    import jax
    import jax.numpy as jnp

    from jaxrel.checkpoint import Checkpointer

    row = 1 << 10
    rows = max(4, int(megabytes * 1e6 / 2 / 4 / row))
    state = {"large": jnp.ones((rows, row)), "rest": [jnp.ones((rows // 4, row))] * 4}
    with Checkpointer(folder, verify_mb_s=0.0) as checkpointer:
        checkpointer.save(1, jax.block_until_ready(state))


def verify_peak(folder: str) -> dict[str, Any]:
    """Peak of a process that only verifies, imports and all."""
    from jaxrel.checkpoint.verify import verify

    document = verify(folder)
    return {"ok": document["ok"], "peak_mb": resident()["VmHWM"], "jax": "jax" in sys.modules}


def growth(saves: int, megabytes: float, large: float) -> dict[str, Any]:
    """Memory by save of both ways, and the peak of a verification; all in fresh processes."""
    result: dict[str, Any] = {"saves": saves, "state_mb": megabytes, "verified_mb": large}
    for name, ours in (("jaxrel", True), ("plain", False)):
        found = in_fresh_process("many_saves", ours, saves, megabytes)
        late = asdict(slope(found, 0.5))
        result[name] = {"resident_mb": found, "slope": asdict(slope(found)), "late": late}
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        in_fresh_process("make_large", folder, large)
        found = in_fresh_process("verify_peak", folder)
    judged = "met" if found["ok"] and found["peak_mb"] < VERIFY_BAR_MB else "not met"
    return result | {"verify": found | {"verdict": judged}}


def show_growth(found: dict[str, Any]) -> None:
    """The figures of `growth`."""
    for name in ("jaxrel", "plain"):
        one, late, all_mb = (found[name][key] for key in ("slope", "late", "resident_mb"))
        bar = f", bar {SLOPE_BAR_MB:g}: {one['verdict']}" if name == "jaxrel" else ""
        print(
            f"{name}: {found['saves']} saves of {found['state_mb']:g} MB, resident"
            f" {all_mb[0]:.0f} MB after the first, {all_mb[-1]:.0f} after the last, at most"
            f" {max(all_mb):.0f}; {one['median']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]"
            f" MB a save after the warm-up{bar}; {late['median']:+.3f} in the last half"
        )
    one = found["verify"]
    print(
        f"verify of {found['verified_mb']:g} MB, half in one leaf: peak {one['peak_mb']:.0f} MB,"
        f" bar {VERIFY_BAR_MB:g}: {one['verdict']} (everything good: {one['ok']})"
    )


TASKS = {f.__name__: f for f in (save_peak, restore_peak, many_saves, make_large, verify_peak)}


def main(task: str, args: str) -> None:
    """In the fresh process: run a task, and print what it found as the last line."""
    if task != "verify_peak":  # the command does not import JAX either
        from jaxrel.mesh.join import use_cpu_devices

        use_cpu_devices(8)
    print(json.dumps(TASKS[task](*json.loads(args))))


if __name__ == "__main__":
    main(*sys.argv[1:])
