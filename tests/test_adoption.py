"""The scripts that users copy: what changes, and that nothing is lost when they are killed."""

import difflib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "scripts" / "examples"
ENVIRONMENT = {name: x for name, x in os.environ.items() if not name.startswith("JAXREL_")} | {
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
}
JAXREL = [sys.executable, "-m", "jaxrel.cli"]


def finish(command: list[Any], cwd: Path, code: int = 0) -> str:
    """What a command prints, both streams."""
    done = subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(printed: str) -> dict[int, str]:
    return {int(n): x for n, x in re.findall(r"^step (\d+)  loss (\S+)$", printed, re.MULTILINE)}


def start(command: list[Any], cwd: Path) -> "subprocess.Popen[str]":
    """Both of its streams in one."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_after(command: list[Any], cwd: Path, line: str, number: int = signal.SIGKILL) -> str:
    """Start `command`, signal it once it prints `line`; what it printed, both streams."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        assert process.stdout is not None
        printed = ""
        for text in process.stdout:
            printed += text
            if text.startswith(line):
                process.send_signal(number)
    return printed


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_few_lines_change(kind: str) -> None:
    plain, reliable = (
        (EXAMPLES / f"{name}_{kind}.py").read_text().splitlines() for name in ("plain", "reliable")
    )
    assert 55 <= len(plain) <= 75
    changes = [
        line
        for line in difflib.unified_diff(plain, reliable, lineterm="", n=0)
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    added = [line for line in changes if line[0] == "+" and line[1:].strip()]
    assert len([line for line in added if '"""' not in line]) <= 5, changes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_killed_anywhere_it_ends_as_the_plain_script(kind: str, tmp_path: Path) -> None:
    wanted = losses(finish([sys.executable, EXAMPLES / f"plain_{kind}.py"], tmp_path))
    assert list(wanted) == [*range(1, 200, 20), 200]
    reliable = [sys.executable, EXAMPLES / f"reliable_{kind}.py"]

    killed = losses(kill_after(reliable, tmp_path, "step 121 "))
    stopped = kill_after(reliable, tmp_path, "step 161 ", signal.SIGTERM)
    found = re.search(r"^jaxrel: asked to stop: step (\d+) is saved", stopped, re.MULTILINE)
    assert found, stopped
    last = finish(reliable, tmp_path)
    assert f"resumed from step {found[1]}\n" in last
    assert killed | losses(stopped) | losses(last) == wanted
    assert all(wanted[step] == loss for step, loss in (killed | losses(stopped)).items())

    report = json.loads(finish([*JAXREL, "report", "run", "--json"], tmp_path))
    assert report["status"] == "finished"
    assert report["steps"] == 200
    resumed = [attempt["resumed_from"] for attempt in report["attempts"]]
    assert resumed in ([0, 50, int(found[1])], [0, 100, int(found[1])])  # 100 was on its way
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert "already complete: step 200" in finish(reliable, tmp_path)
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.slow
def test_a_loop_of_ones_own_under_launch(tmp_path: Path) -> None:
    script = [sys.executable, EXAMPLES / "own_loop.py"]
    (tmp_path / "alone").mkdir()
    wanted = losses(finish(script, tmp_path / "alone"))
    launch = [*JAXREL, "launch", "--dir", "run", "--", *map(str, script)]
    killed = subprocess.Popen(
        launch,
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with killed:
        assert killed.stderr is not None
        printed = ""
        for line in killed.stderr:
            printed += line
            if line.startswith("step 141 ") and printed.count("step 141 ") == 1:
                segments = (tmp_path / "run" / "ledger").glob("*-rank0-*.jsonl")
                started = json.loads(sorted(segments)[-1].read_text().splitlines()[0])
                os.kill(started["pid"], signal.SIGKILL)
    assert killed.returncode == 0, printed
    assert "rank 0 on host0: signal: killed by SIGKILL" in printed
    assert losses(printed) == wanted


def test_the_script_to_copy_trains_a_model_of_its_own(tmp_path: Path) -> None:
    flags = [
        ROOT / "scripts/configs/tiny.yaml", "--run.dir", "run", "--run.steps", "40",
        "--batch.sequence", "16", "--model.hidden", "16", "--evaluation.every", "6",
        "--evaluation.batches", "1", "--checkpoint.interval", "6",
    ]  # fmt: skip
    script = [sys.executable, ROOT / "scripts/train.py", *flags, "--mesh.cpu_devices"]
    kill_after([*script, "8", "--run.print_every", "1"], tmp_path, "step 38/")
    resumed = finish([*script, "4"], tmp_path)
    assert re.search(r"^resumed from step (6|12|18|24|30|36)", resumed, re.MULTILINE)
    whole = finish([*script, "2", "--run.dir", "whole"], tmp_path)
    digests = [re.findall(r"state digest (\w{32})", text) for text in (resumed, whole)]
    assert digests[0] == digests[1] != []
    assert finish([*script, "2", "--run.step", "3"], tmp_path, code=64).startswith("jaxrel: run.st")


FAILING = """
import jaxrel, jax.numpy as jnp, sys
state = {"w": jnp.zeros(3)}
run = jaxrel.attach("run", state, steps=10, interval=2)
for step in run:
    if step == 5:
        EVENT
    run.completed({"w": run.state["w"] + 1}, loss=1.0)
"""


@pytest.mark.parametrize(
    ("event", "code", "said"),
    [
        ("raise KeyError('w')", 70, "KeyError: 'w'\n"),
        ("run.completed(run.state, loss=float('nan'))", 77, "jaxrel: step 6: loss nan; nothing"),
        ("run.completed()", 64, "jaxrel: completed: got no state"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("sys.exit(3)", 3, ""),
    ],
)
def test_the_exit_code_says_what_happened(tmp_path: Path, event: str, code: int, said: str) -> None:
    printed = finish([sys.executable, "-c", FAILING.replace("EVENT", event)], tmp_path, code)
    assert said in printed
    if code < 128 and code != 3:  # a script may leave as it likes
        report = json.loads(finish([*JAXREL, "report", "run", "--json"], tmp_path))
        assert report["status"] == "failed" and report["attempts"][0]["exit"] == code
    resumed = finish([sys.executable, "-c", FAILING.replace("EVENT", "pass")], tmp_path)
    assert "resumed from step 4" in resumed
    report = json.loads(finish([*JAXREL, "report", "run", "--json"], tmp_path))
    assert report["status"] == "finished"


ATTACHED = """
import grain, jaxrel, jax.numpy as jnp
data = iter(grain.MapDataset.range(9).to_iter_dataset())
run = jaxrel.attach("run", {STATE}, steps=STEPS, interval=2, data=DATA)
for step in run:
    run.completed(run.state)
"""


@pytest.mark.parametrize(
    ("state", "steps", "data", "code", "said"),
    [
        ("'w': jnp.zeros(4)", 8, "None", 65, "w: saved as float32 [3], wanted float32 [4]"),
        ("'w': jnp.zeros(3, 'bfloat16')", 8, "None", 65, "saved as float32 [3], wanted bfloat16"),
        ("'v': jnp.zeros(3)", 8, "None", 65, "v: not in the checkpoint"),
        ("'w': jnp.zeros(4)", 4, "None", 65, "w: saved as float32 [3], wanted float32 [4]"),
        ("'w': jnp.zeros(3)", 8, "(x for x in 'ab')", 64, "data: got generator: expected an iter"),
        ("'w': jnp.zeros(3)", 8, "data", 65, "checkpoint of step 4: has no data position"),
        ("'w': jnp.zeros(3)", 0, "None", 64, "jaxrel: steps: got 0: expected at least 1"),
    ],
)
def test_another_state_or_other_data_is_refused(
    tmp_path: Path, state: str, steps: int, data: str, code: int, said: str
) -> None:
    def attach(state: str, steps: int, data: str, code: int) -> str:
        text = ATTACHED.replace("STATE", state).replace("STEPS", str(steps))
        return finish([sys.executable, "-c", text.replace("DATA", data)], tmp_path, code)

    attach("'w': jnp.zeros(3)", 4, "None", 0)
    before = sorted(tmp_path.rglob("checkpoints/*"))
    printed = attach(state, steps, data, code)
    assert said in printed
    assert "Traceback" not in printed
    assert sorted(tmp_path.rglob("checkpoints/*")) == before


JOINED = """
import os, signal
import jaxrel
jaxrel.join()
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((jax.device_count(),), ("data",))
split = NamedSharding(mesh, PartitionSpec("data"))
state = jax.jit(lambda: {"w": jnp.arange(8.0)}, out_shardings={"w": split})()
step_fn = jax.jit(lambda s: ({"w": s["w"] * 1.5}, jnp.sum(s["w"])))
run = jaxrel.attach("run", state, steps=12, interval=4)
for step in run:
    if step == 9 and os.environ["JAXREL_ATTEMPT"] == "1" and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    state, loss = step_fn(run.state)
    run.completed(state, loss=loss)
print("devices", jax.device_count(), "done", run.done, flush=True)
"""


@pytest.mark.slow
def test_a_loop_of_several_processes_joins_and_is_made_good(tmp_path: Path) -> None:
    launch = [*JAXREL, "launch", "--hosts", "2", "--cpu-devices", "2", "--dir", "run", "--"]
    printed = finish([*launch, sys.executable, "-c", JOINED], tmp_path)
    assert "rank 1 on host1: signal: killed by SIGKILL" in printed
    assert "devices 4 done 12" in printed
    report = json.loads(finish([*JAXREL, "report", "run", "--json"], tmp_path))
    assert report["status"] == "finished"
    assert [(a["devices"], a["processes"]) for a in report["attempts"]] == [(4, 2), (4, 2)]
    assert report["attempts"][1]["resumed_from"] in (4, 8)
    assert report["badput_s"]["unknown"] < 0.5


def test_a_process_that_did_not_join_its_job_is_told_so(tmp_path: Path) -> None:
    launch = [*JAXREL, "launch", "--hosts", "2", "--dir", "run", "--", sys.executable, "-c"]
    printed = finish([*launch, FAILING.replace("EVENT", "pass")], tmp_path, 64)
    assert "attach: this is one of 2 processes of a job and has not joined it" in printed


@pytest.mark.slow
def test_a_loop_of_ones_own_has_a_local_tier_too(tmp_path: Path) -> None:
    """Two hosts with a disk each; nothing durable but the end."""
    code = JOINED.replace(
        "interval=4",
        f"interval=100, local_dir={str(tmp_path / 'disk')!r} + '/{{host}}', local_interval=3",
    ).replace("{{host}}", "{host}")
    launch = [*JAXREL, "launch", "--hosts", "2", "--cpu-devices", "2", "--dir", "run", "--"]
    printed = finish([*launch, sys.executable, "-c", code], tmp_path)
    assert "devices 4 done 12" in printed
    report = json.loads(finish([*JAXREL, "report", "run", "--json"], tmp_path))
    assert report["status"] == "finished"
    assert report["attempts"][1]["resumed_from"] in (6, 9)
    assert not list((tmp_path / "disk").rglob("*.npz"))
