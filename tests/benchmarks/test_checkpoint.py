"""The benchmark of checkpoints compares equal work, and does not claim what it cannot."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import checkpoint, checkpoint_arms, checkpoint_memory, local_tier, resume_memory
from benchmarks.checkpoint import FIGURES, SELDOM, SELDOM_ROUNDS, TASKS
from benchmarks.checkpoint_arms import (
    AGAIN,
    GIVEN,
    NO_SAVE,
    OURS,
    PLAIN,
    UNCOMPRESSED,
    UNREAD,
    UNVERIFIED,
    Size,
    Used,
    opened,
)
from jaxrel.checkpoint import describe, restoring

SIZE = Size(16, 1)


@pytest.fixture(scope="module")
def state() -> Any:
    return checkpoint_arms.make_state(SIZE)


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("arm", [PLAIN, UNCOMPRESSED, OURS, GIVEN, UNVERIFIED])
def test_every_arm_restores_what_it_saved_into_the_same_shardings(
    state: Any, arm: str, tmp_path: Path
) -> None:
    with opened(tmp_path, arm, state) as way:
        way.save(state)
        way.wait()
        restored = way.restore(checkpoint_arms.abstract(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert (new.dtype, new.sharding) == (old.dtype, old.sharding)
        np.testing.assert_array_equal(np.asarray(old), np.asarray(new))


def test_a_state_is_as_large_as_asked_for_and_hard_to_compress(state: Any, tmp_path: Path) -> None:
    size = Size.of(1.0, quick=False)
    whole = checkpoint_memory.abstract_state(size.hidden, size.layers)
    assert 1e9 <= _bytes(whole) < 1.2e9
    assert {str(x.dtype) for x in jax.tree.leaves(whole)} == {"bfloat16", "float32"}
    sizes = {len(x.sharding.device_set) for x in jax.tree.leaves(whole)}
    assert sizes == {8}
    assert checkpoint_memory.abstract_state(16, 1) == checkpoint_arms.abstract(state)
    quick = checkpoint_arms.make_state(Size.of(1.0, quick=True))
    on_disk = checkpoint_arms.save(tmp_path, PLAIN, quick)["disk_bytes"]
    assert 0.75 < on_disk / _bytes(quick) < 1.1


def test_ablations_take_out_what_they_say(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs, digests = [], []
    proof, digest = restoring._verify, describe.leaves.words
    computed: dict[str, int] = {}

    def spy(*args: Any) -> None:
        proofs.append(proof(*args))

    def counted(tree: Any) -> Any:
        digests.append(digest(tree))
        return digests[-1]

    monkeypatch.setattr(restoring, "_verify", spy)
    for arm in (OURS, UNREAD, GIVEN, UNVERIFIED):
        folder = tmp_path / arm.replace(", ", "-")
        with opened(folder, arm, state) as way:
            with monkeypatch.context() as patch:
                patch.setattr(describe.leaves, "words", counted)
                before = len(digests)
                way.save(state)
                computed[arm] = len(digests) - before
            way.wait()
            keeper = way.checkpointer._keeper  # type: ignore[attr-defined]
            assert (keeper._reading is None) == (arm == UNREAD)
            before = len(proofs)
            way.restore(checkpoint_arms.abstract(state))
            assert len(proofs) - before == (arm != UNVERIFIED)
        assert restoring._verify is spy, "the proof is put back"
    assert computed == {OURS: 1, UNREAD: 1, GIVEN: 0, UNVERIFIED: 1}


def test_a_save_is_split_and_counted(state: Any, tmp_path: Path) -> None:
    found = checkpoint_arms.save(tmp_path, OURS, state)
    assert 0 < found["blocking_s"] <= found["commit_s"]
    assert found["disk_bytes"] >= _bytes(state)
    assert found["commit_written"] >= _bytes(state)
    read = checkpoint_arms.restore(tmp_path, OURS, checkpoint_arms.abstract(state))
    assert read["restore_read"] >= _bytes(state)


def test_use_is_counted_between_two_moments(tmp_path: Path) -> None:
    began = Used.now()
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    found = Used.now().since(began, "x_")
    assert 1_000_000 <= found["x_written"] < 1_100_000
    assert found["x_s"] > 0


@pytest.mark.parametrize("arm", [NO_SAVE, PLAIN, OURS, UNREAD])
def test_steps_run_while_a_save_is_under_way(state: Any, tmp_path: Path, arm: str) -> None:
    step = checkpoint_arms.make_step(quick=True)
    found = checkpoint_arms.steps_during(tmp_path, arm, state, step, idle_s=0.01)
    assert found["step_s"] > 0 and found["steps"] >= 1
    assert ("blocking_s" in found) == (arm != NO_SAVE)
    if arm in (PLAIN, UNREAD):
        assert "readback_step_s" not in found


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = checkpoint_arms.disk_speed(tmp_path, 3_000_000)
    assert len(found) == 3 and min(found.values()) > 0
    assert not list(tmp_path.iterdir())


def test_arms_are_interleaved_and_ablations_take_part_in_the_first_rounds() -> None:
    calls: list[tuple[str, str]] = []

    def measure(task: str) -> Callable[[Path, str], dict[str, float]]:
        def one(folder: Path, arm: str) -> dict[str, float]:
            assert folder.is_dir() and not list(folder.iterdir())
            calls.append((task, arm))
            return {"s": 1.0}

        return one

    rounds = checkpoint.interleave({task: measure(task) for task in TASKS}, SELDOM_ROUNDS + 1)
    everything = {(task, arm) for task, arms in TASKS.items() for arm in arms}
    seen = [{(task, arm) for task in one for arm in one[task]} for one in rounds]
    assert seen == [everything] * SELDOM_ROUNDS + [everything - SELDOM]
    n = len(everything)
    assert calls[:n] != calls[n : 2 * n] and set(calls[:n]) == set(calls[n : 2 * n])
    assert len(checkpoint.interleave({"save": measure("save")}, 5, limit_s=0.0)) <= 1


def _rounds(count: int, ours: float, spread: float = 0.01) -> list[Any]:
    """Everything is 1 in plain, `ours` in jaxrel, and the control is off by up to `spread`."""
    keys = {figure.key for figure in FIGURES} | {
        "steps", "disk_bytes", "commit_written", "commit_read", "restore_read", "restore_written",
    }  # fmt: skip

    def value(arm: str, n: int) -> float:
        if arm == AGAIN:
            return 1 + spread * (n % 3 - 1)
        return 0.5 if arm == NO_SAVE else ours if arm == OURS else 1.0

    return [
        {
            task: {
                arm: dict.fromkeys(keys, value(arm, n))
                for arm in arms
                if n < SELDOM_ROUNDS or (task, arm) not in SELDOM
            }
            for task, arms in TASKS.items()
        }
        for n in range(count)
    ]


@pytest.mark.parametrize(
    "count, ours, spread, expected",
    [
        (6, 1.02, 0.01, "met"),
        (6, 1.30, 0.01, "not met"),
        (6, 1.02, 0.20, "undecided"),
        (5, 1.02, 0.01, "undecided"),
    ],
)
def test_every_bar_is_judged_by_the_control_and_enough_rounds(
    count: int, ours: float, spread: float, expected: str
) -> None:
    judged = checkpoint.judge(_rounds(count, ours, spread), state_bytes=2)
    barred = [f for f in judged["figures"] if f["bar"] is not None]
    assert {f["name"]: f["bar"] for f in barred} == {
        "blocking of a save": 1.1,
        "save to commit": 1.1,
        "restore": 1.2,
        "peak memory of a save": 1.1,
        "peak memory of a restore": 1.1,
        "step during a save": 1.05,
    }
    for figure in barred:
        assert figure["verdicts"][OURS] == expected
        assert figure["ratios"][OURS]["median"] == pytest.approx(ours)
        assert not any(arm.startswith("plain") for arm in figure["verdicts"])
        ablated = [
            arm for task, arm in SELDOM if task == figure["task"] and arm in figure["verdicts"]
        ]
        assert all(figure["verdicts"][arm] == "undecided" for arm in ablated), "too few rounds"
    assert judged["structure"]["save"][OURS]["on disk"] == pytest.approx(ours / 2)
    assert judged["structure"]["save"][OURS]["CPU s/GB"] == pytest.approx(ours / 2 * 1e9)


def test_what_a_save_costs_the_steps_is_its_blocking_and_their_slowness() -> None:
    (one,) = _rounds(1, 3.0)
    one["step"][OURS] |= {"blocking_s": 0.25, "steps": 10, "step_s": 0.7}
    assert checkpoint.with_lost(one)["step"][OURS]["lost_s"] == pytest.approx(0.25 + 10 * 0.2)


@pytest.mark.parametrize(
    "growth_mb, saves, expected",
    [(0.0, 100, "met"), (3.0, 100, "not met"), (1.0, 100, "undecided"), (0.0, 8, "undecided")],
)
def test_memory_that_grows_after_the_warm_up_is_found(
    growth_mb: float, saves: int, expected: str
) -> None:
    noise = np.random.default_rng(0).normal(0, 5, saves)
    warming = np.minimum(np.arange(saves), saves / 5) * 50
    found = checkpoint_memory.slope(list(500 + warming + growth_mb * np.arange(saves) + noise))
    assert found.verdict == expected
    if saves > 10:
        assert found.median == pytest.approx(growth_mb, abs=0.1)


def test_memory_is_read_after_every_save() -> None:
    for ours in (True, False):
        found = checkpoint_memory.many_saves(ours, 3, 0.1)
        assert len(found) == 3 and min(found) > 50


def test_a_peak_starts_anew_and_sees_what_was_freed() -> None:
    checkpoint_memory.reset_peak()
    before = checkpoint_memory.resident()["VmRSS"]
    np.ones(80_000_000, np.uint8)  # more than malloc ever keeps for the next
    peak = checkpoint_memory.resident()["VmHWM"]
    assert 79 < peak - before < 120
    checkpoint_memory.reset_peak()
    assert checkpoint_memory.resident()["VmHWM"] < peak - 50


def test_a_fresh_process_measures_or_says_why_not(tmp_path: Path) -> None:
    found = checkpoint_memory.in_fresh_process("save_peak", OURS, SIZE.hidden, SIZE.layers)
    assert 0 < found["added_mb"] < found["peak_mb"]
    checkpoint_memory.make_large(str(tmp_path), 0.1)
    verified = checkpoint_memory.in_fresh_process("verify_peak", str(tmp_path))
    assert verified["ok"] and not verified["jax"] and verified["peak_mb"] < 500
    with pytest.raises(RuntimeError, match="no complete checkpoint"):
        checkpoint_memory.in_fresh_process("verify_peak", str(tmp_path / "missing"))


def _fresh(task: str, *args: Any) -> Any:
    if task == "many_saves":
        return [100.0] * args[1]
    if task == "make_large":
        return None
    return {"ok": True, "peak_mb": 600.0, "added_mb": 1.0}


def test_the_result_holds_every_figure_and_both_kinds_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "use_cpu_devices", lambda _: None)  # there are eight already
    monkeypatch.setattr(checkpoint_memory, "in_fresh_process", _fresh)
    out = tmp_path / "result.json"
    checkpoint.main(["--quick", "--out", str(out)])
    result = json.loads(out.read_text())
    found = result["comparison"]
    assert [f["name"] for f in found["figures"]] == [f.name for f in FIGURES]
    for figure in found["figures"]:
        assert set(figure["ratios"]) == set(TASKS[figure["task"]]) - {PLAIN, AGAIN, NO_SAVE}
        assert set(figure.get("verdicts", {"": "undecided"}).values()) == {"undecided"}
    assert set(found["structure"]) == {"save", "restore"} and len(found["disk"]) == 2
    assert {"date", "cpu", "revision", "command", "load_average_after"} <= set(found)
    assert "orbax-checkpoint" in found["versions"]
    assert set(result["growth"]["jaxrel"]["slope"]) == {"median", "low", "high", "verdict"}
    assert result["growth"]["verify"]["verdict"] == "not met", "600 MB are more than 500"
    told = capsys.readouterr().out
    assert all(f"{figure.name}: plain" in told for figure in FIGURES)
    checkpoint.main(["--rss", "20", "--out", str(out)])
    again = json.loads(out.read_text())
    assert again["comparison"] == found, "the other kind stays"
    assert (again["growth"]["saves"], again["growth"]["state_mb"]) == (20, 50.0)


def test_the_local_tiers_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "local.json"
    argv = ["x", "--quick", "--local", str(tmp_path), "--durable", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    local_tier.main()
    found = json.loads(out.read_text())
    assert set(found["ratios"]) == {"blocking_s", "complete_s", "restore_s"}
    assert len(found["rounds"]) == 2
    assert all(set(one) == {"durable", "local", "local again"} for one in found["rounds"])


@pytest.mark.slow
def test_a_resume_is_measured_beside_a_cold_start() -> None:
    found = resume_memory.compare(resume_memory.QUICK, 1)
    (one,) = found["rounds"]
    assert min(one.values()) > 100, "MB: JAX alone takes more"
    assert found["ratios"] == [one["resumed_mb"] / one["cold_mb"]]
    assert (found["verdict"] == "met") == (found["ratios"][0] <= resume_memory.BAR)
    assert found["checkpoint_bytes"] > 0
