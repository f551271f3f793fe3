"""`jaxrel flops`: three counts of the shipped configuration's step, side by side."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxrel.cli import main
from jaxrel.config_file import load
from jaxrel.plan.architecture import Architecture
from jaxrel.plan.conventions import flops_per_token
from scripts.campaigns.workers import ROOT

TINY = str(ROOT / "scripts" / "configs" / "tiny.yaml")


def counted(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["flops", TINY, "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_shipped_run_costs_what_its_architecture_says(
    remat: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(TINY)
    found = counted(capsys, "--model.remat", remat, "--mesh.data", "8")
    m = config.model
    architecture = Architecture(
        layers=m.layers, hidden=m.hidden, heads=m.heads, kv_heads=m.kv_heads,
        head_dim=m.head_dim or m.hidden // m.heads, mlp=m.mlp, mlp_matrices=3,
        sequence=config.batch.sequence, vocabulary=m.vocabulary,
    )  # fmt: skip
    assert found["model_flops_per_token"] == flops_per_token(architecture, "maxtext")
    tokens = config.batch.global_size * config.batch.sequence
    assert found["tokens_per_step"] == tokens
    assert found["model_flops_per_step"] == found["model_flops_per_token"] * tokens
    assert sum(found["by_operation"].values()) == found["model_flops_per_step"]
    assert found["model_flops_per_device"] * 8 == found["model_flops_per_step"]
    assert found["hardware_flops_per_device"] * 8 == found["hardware_flops_per_step"]
    if remat == "none":
        assert found["recomputed_share"] == pytest.approx(0, abs=0.01)
    else:
        assert 0.2 < found["recomputed_share"] < 0.34
    # XLA counts the loop over four layers once.
    assert found["xla_reported_flops_per_step"] < found["hardware_flops_per_step"]
    assert any("counted once by XLA, 4 times here" in line for line in found["xla_difference"])
    assert "causal mask" in found["definition"] and "embeddings" in found["definition"]
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_wrong_configuration_is_refused_before_anything_is_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["flops", TINY, "--batch.groups", "0"]) == 64
    assert "batch.groups: got 0" in capsys.readouterr().err
