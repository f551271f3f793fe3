"""A drill refuses what it cannot do, draws from its seed, interrupts, and sees what differs."""

import contextlib
import itertools
import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxrel.checkpoint import manifest
from jaxrel.config import Config
from jaxrel.config_file import load, to_yaml
from jaxrel.exit_codes import FailedError, UsageError
from jaxrel.habits.agreement import Outcome, first_difference
from jaxrel.habits.drill import TOLERANCE, Attempt, Drill, draw, drill, tell, verdict
from jaxrel.ledger.reader import segments
from scripts.campaigns.workers import ROOT

TINY = ROOT / "scripts" / "configs" / "tiny.yaml"
STEPS = 40


def written(path: Path, **sections: dict[str, Any]) -> str:
    """The tiny configuration with other values, as a file."""
    config = load(TINY)
    changed = {name: replace(getattr(config, name), **keys) for name, keys in sections.items()}
    path.write_text(to_yaml(replace(config, **changed)))
    return str(path)


# Refused


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"kills": 0}, "--kills: got 0: expected at least 1"),
        ({"kinds": "kill,hang"}, "--kinds: got 'kill,hang': expected some of kill,term,stop,exc"),
        ({"kinds": ""}, "--kinds: got '': expected some of"),
        ({"resize": "8;4"}, "--resize: got '8;4': expected counts such as 8,4,2"),
        ({"resize": "8,0"}, "--resize: got '8,0': expected counts"),
        ({"resize": "8,3"}, "mesh.data: got 3: expected a power of two"),
        ({"resize": "16"}, "batch.groups: got 8: expected at least mesh.data x mesh.fsdp"),
        ({"directory": str(ROOT)}, f"--dir: got '{ROOT}': expected a new or empty folder"),
        ({"config": "absent.yaml"}, "absent.yaml: no such file"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        drill(Drill(**{"config": str(TINY), **flags}))
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("sections", "resize", "says"),
    [
        ({"mesh": {"fsdp": 4}}, "8,2", "--resize: got 2: expected multiples of 4"),
        ({"mesh": {"data": 2, "fsdp": -1}}, "8", "--resize: expected mesh.data to be the only"),
        ({"run": {"steps": 1}}, "", "run.steps: got 1: expected at least 2"),
        ({"job": {"detect": True}}, "", "job: expected nothing"),
    ],
)
def test_a_configuration_that_cannot_be_drilled_is_refused(
    tmp_path: Path, sections: dict[str, Any], resize: str, says: str
) -> None:
    with pytest.raises(UsageError) as refused:
        Drill(written(tmp_path / "c.yaml", **sections), resize=resize).check()
    assert str(refused.value).startswith(says)


def test_jax_is_not_imported() -> None:
    code = "import jaxrel.habits.drill, sys; print({'jax', 'orbax', 'grain'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n"


# Drawn


def test_interruptions_are_drawn_from_the_seed_alone() -> None:
    asked, config = Drill("", kills=8), Config()
    drawn = draw(asked, config)
    assert drawn == draw(asked, config) != draw(replace(asked, seed=1), config)
    assert {i.kind for i in drawn[:4]} == {i.kind for i in drawn[4:]} == {*asked.kinds.split(",")}
    steps = [i.step for i in drawn]
    assert steps == sorted(steps) and 1 <= min(steps) <= max(steps) <= 40, "a save is to come"
    assert all(0 <= i.fraction < 1 for i in drawn)
    where = [i.where for i in drawn if i.kind != "exception"]  # which comes instead of a step
    assert where in (["step", "save"] * 3, ["save", "step"] * 3)
    assert {i.where for i in drawn if i.kind == "exception"} == {"step"}
    assert len({draw(replace(asked, seed=seed), config)[0] for seed in range(20)}) == 20


# Compared

ONE = Outcome({1: 3.0, 2: 2.0, 3: 1.0}, "d", {"params/a": "0a", "params/b": "0b"})
NUDGED = {**ONE.losses, 2: 2.0 * (1 + 1e-7)}


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({}, None),
        ({"losses": NUDGED}, {"step": 2, "leaf": None}),
        ({"losses": {1: 3.0, 3: 1.0}}, {"step": 2, "leaf": None}),
        ({"losses": {**ONE.losses, 1: math.nan}}, {"step": 1, "leaf": None}),
        ({"leaves": {"params/a": "0a", "params/b": "1b"}}, {"step": 3, "leaf": "params/b"}),
        ({"leaves": {"params/b": "0b"}}, {"step": 3, "leaf": "params/a"}),
        ({"leaves": {**ONE.leaves, "params/c": "0c"}}, {"step": 3, "leaf": "params/c"}),
        ({"state_digest": "e"}, {"step": 3, "leaf": None}),
        (
            {"losses": NUDGED, "leaves": {"params/a": "1a", "params/b": "1b"}},
            {"step": 2, "leaf": "params/a"},
        ),
    ],
)
def test_the_first_difference_is_found(changed: dict[str, Any], difference: Any) -> None:
    assert first_difference(ONE, replace(ONE, **changed), 3, None) == difference


def test_a_tolerance_is_of_losses_alone() -> None:
    other = Outcome(NUDGED, "e", {})
    assert first_difference(ONE, other, 3, 1e-6) is None
    assert first_difference(ONE, other, 3, 1e-8) == {"step": 2, "leaf": None}
    lost = replace(other, losses={1: 3.0, 2: 2.0})
    assert first_difference(ONE, lost, 3, 1e-6) == {"step": 3, "leaf": None}


@pytest.mark.parametrize(
    ("reduction", "resize", "tolerance"),
    [
        ("invariant", "8,4", None),
        ("fast", "8,8", None),
        ("fast", "", None),
        ("fast", "8,4", TOLERANCE["float32"]),
    ],
)
def test_bits_are_held_wherever_they_are_promised(
    tmp_path: Path, reduction: str, resize: str, tolerance: float | None
) -> None:
    asked = Drill(written(tmp_path / "c.yaml", batch={"reduction": reduction}), resize=resize)
    assert asked.tolerance(asked.check()) == tolerance


# For real


def test_a_run_that_was_finished_before_it_was_interrupted_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("undisturbed", None), ("_interrupt", False)):
        monkeypatch.setattr(f"jaxrel.habits.drill._Runs.{name}", lambda *_, value=value: value)
    monkeypatch.setattr("jaxrel.habits.drill._usual", lambda run: {"step": 0.0, "save": 0.0})
    with pytest.raises(FailedError, match="nothing was interrupted"):
        drill(Drill(str(TINY), directory=str(tmp_path / "runs")))


@pytest.fixture(scope="module")
def drilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, dict[str, Any]]:
    """The folder of a drill, its exit code and its document."""
    folder, out = tmp_path_factory.mktemp("drill"), StringIO()
    config = written(
        folder / "config.yaml",
        run={"steps": STEPS, "dir": str(folder / "mine")},
        mesh={"cpu_devices": 2},
        batch={"global_size": 4, "sequence": 32, "groups": 2},
        model={"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "mlp": 64, "remat": "none"},
        checkpoint={"interval": 8, "dir": str(folder / "mine" / "checkpoints")},
    )
    runs = str(folder / "runs")
    flags = {"kinds": "kill,exception", "resize": "2,1", "directory": runs}
    asked = Drill(config, kills=2, seed=1, json=True, **flags)
    with contextlib.redirect_stdout(out):
        code = drill(asked)
    return folder, code, json.loads(out.getvalue())


@pytest.mark.slow
def test_an_interrupted_run_agrees_with_one_that_nobody_touched(
    drilled: tuple[Path, int, dict[str, Any]],
) -> None:
    folder, code, document = drilled
    assert (code, document["ok"], document["first_difference"]) == (0, True, None), document
    rows = document["rows"]
    assert {row["kind"] for row in rows[:2]} == {"kill", "exception"} and rows[2]["kind"] is None
    assert [row["devices"] for row in rows] == [2, 1, 2]
    assert rows[0]["resumed_from"] == 0 and rows[2]["step"] == STEPS
    for row, following in itertools.pairwise(rows):
        assert row["steps_lost"] == row["step"] - following["resumed_from"] >= 0
    assert len(document["state_digests"]) == 2 and len({*document["state_digests"]}) == 1
    assert not (folder / "mine").exists(), "the configuration's own run is left alone"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["loss", "leaf"])
def test_one_difference_is_enough_to_fail(
    drilled: tuple[Path, int, dict[str, Any]], tmp_path: Path, what: str
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(drilled[0] / "runs", runs)
    attempts = [Attempt(row["kind"], row["where"]) for row in drilled[2]["rows"]]
    assert verdict(runs, attempts, STEPS, None)["ok"]
    if what == "loss":
        last = segments(runs / "run")[-1]
        lines = [json.loads(line) for line in last.read_text().splitlines()]
        step = next(line for line in lines if line["event"] == "StepCompleted")
        step["loss"] = math.nextafter(step["loss"], 0)
        last.write_text("".join(json.dumps(line) + "\n" for line in lines))
        expected: dict[str, Any] = {"step": step["step"], "leaf": None}
    else:
        path = runs / "run" / "checkpoints" / str(STEPS) / manifest.ITEM / manifest.FILE
        content = json.loads(path.read_text())
        name = [*content["leaves"]][3]
        content["leaves"][name]["digest"] = "0" * 32
        del content["checksum"]
        path.write_text(json.dumps(manifest.seal(content)))
        expected = {"step": STEPS, "leaf": name}
    document = verdict(runs, attempts, STEPS, None)
    assert (document["ok"], document["first_difference"]) == (False, expected)
    out = StringIO()
    assert tell(document, Console(file=out, width=100)) == 1
    leaf = expected["leaf"] or "none is known"
    assert f"NO   first differing step {expected['step']}, leaf {leaf}\n" in out.getvalue()
