"""`jaxrel checkpoint verify`: every digest, without JAX, in little memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxrel.checkpoint import Checkpointer, engine, listing
from jaxrel.cli import main
from tests.checkpoint import states
from tests.checkpoint.test_fallback import damage, save, statuses


@pytest.mark.core
def test_verify_finds_the_damaged_leaf_without_jax(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, verify_mb_s=0)
    damage(tmp_path, 2)
    (tmp_path / "3" / "manifest" / "metadata").write_text('{"format": 1, "checksum": 1}')
    (tmp_path / "7").mkdir()
    code = f"""
import json, sys
from jaxrel.checkpoint.verify import verify
print(json.dumps(verify({str(tmp_path)!r})))
assert not {{"jax", "orbax"}} & set(sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    document = json.loads(ran.stdout)
    first, second, third = document["checkpoints"]
    assert document["ok"] is False
    assert first == {"step": 1, "tier": "durable", "ok": True, "bad_leaves": []}
    assert (second["step"], second["ok"]) == (2, False)
    assert set(second["bad_leaves"]) < set(manifest_leaves(tmp_path, 1))
    assert third == {"step": 3, "tier": "durable", "ok": False, "bad_leaves": ["(manifest)"]}
    assert statuses(tmp_path) == {1: "verified", 2: "corrupt", 3: "corrupt", 7: "incomplete"}
    assert Checkpointer(tmp_path).latest() == 1


def manifest_leaves(directory: Path, step: int) -> list[str]:
    return list(json.loads((directory / str(step) / "manifest" / "metadata").read_text())["leaves"])


def test_the_command_says_it_and_exits_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save(run / "checkpoints", 1, 2, verify_mb_s=0)
    assert main(["checkpoint", "verify", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] and [row["step"] for row in document["checkpoints"]] == [1, 2]
    damage(run / "checkpoints", 2)
    assert main(["checkpoint", "verify", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step        1  every digest is right"
    assert lines[1].startswith("step        2  damaged: ")
    assert main(["checkpoint", "verify", str(run), "--step", "1"]) == 0
    assert main(["checkpoint", "verify", str(run), "--step", "5"]) == 65
    assert "no complete checkpoint of step 5" in capsys.readouterr().err


def test_arrays_of_another_step_are_bad(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, verify_mb_s=0)
    shutil.rmtree(tmp_path / "2" / "state")
    shutil.copytree(tmp_path / "1" / "state", tmp_path / "2" / "state")
    assert main(["checkpoint", "verify", str(tmp_path), "--step", "2"]) == 1


def test_a_leaf_of_several_chunks_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxrel.checkpoint import readback

    monkeypatch.setattr(engine, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(readback, "_PIECE", 300)
    state = {"x": jnp.arange(50 * 7 * 33, dtype=jnp.float32).reshape(50, 7, 33), "e": jnp.ones(())}
    with Checkpointer(tmp_path, verify_mb_s=0) as checkpointer:
        checkpointer.save(1, state)
    sizes: list[int] = []
    assert readback.bad_leaves(listing.scan(tmp_path)[0].path, sizes.append) == []
    assert max(sizes) <= 1200 and sum(sizes) == 50 * 7 * 33 * 4 + 4


def test_a_wide_state_of_every_kind_of_leaf(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, verify_mb_s=0) as checkpointer:
        checkpointer.save(1, states.make(1, states.mesh(4, 2), 64))
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
