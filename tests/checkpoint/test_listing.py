"""The list of checkpoints, read without JAX."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxrel.checkpoint import Checkpointer
from jaxrel.checkpoint.listing import list_checkpoints
from jaxrel.exit_codes import UsageError

STATE = {"x": jnp.arange(1000.0)}


@pytest.mark.core
def test_listing_imports_no_jax_and_gives_the_contract(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, verify_mb_s=0) as checkpointer:
        for step in (5, 10):
            checkpointer.save(step, STATE)
    (tmp_path / "7").mkdir()
    (tmp_path / "11.orbax-checkpoint-tmp-00000000-1").mkdir()
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "weights").write_text("theirs")
    (tmp_path / "notes.txt").write_text("theirs")
    manifest = tmp_path / "10" / "manifest" / "metadata"
    state_digest = json.loads(manifest.read_text())["state_digest"]
    code = f"""
import json, sys
from jaxrel.checkpoint.listing import list_checkpoints
print(json.dumps(list_checkpoints({str(tmp_path)!r})))
assert not {{"jax", "orbax", "tensorstore"}} & set(sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    document = json.loads(result.stdout)
    assert document == list_checkpoints(tmp_path)
    assert document["latest_restorable"] == 10
    rows = document["checkpoints"]
    assert [(row["step"], row["status"]) for row in rows] == [
        (5, "committed"),
        (7, "incomplete"),
        (10, "committed"),
        (11, "incomplete"),
        (12, "foreign"),
    ]
    assert rows[2]["state_digest"] == state_digest
    files = [file for file in (tmp_path / "10").rglob("*") if file.is_file()]
    assert rows[2]["bytes"] == sum(file.stat().st_size for file in files) > 4000
    assert all(row["tier"] == "durable" and row["trusted"] is False for row in rows)
    assert {row["state_digest"] for row in rows if row["status"] != "committed"} == {None}


def test_a_damaged_manifest_is_not_restorable(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, verify_mb_s=0) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, STATE)
    (tmp_path / "3" / "manifest" / "metadata").unlink()
    (tmp_path / "2" / "manifest" / "metadata").write_bytes(b'{"format": 1\xff')
    document = list_checkpoints(tmp_path)
    assert [row["status"] for row in document["checkpoints"]] == ["committed", "corrupt", "corrupt"]
    assert document["latest_restorable"] == 1


def test_an_empty_and_a_missing_directory(tmp_path: Path) -> None:
    empty = {"latest_restorable": None, "checkpoints": []}
    assert list_checkpoints(tmp_path) == list_checkpoints(tmp_path / "none") == empty
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="checkpoint directory .*/file is not a directory"):
        list_checkpoints(tmp_path / "file")
