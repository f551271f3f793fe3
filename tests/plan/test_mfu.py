"""Utilisation against what was published, its words, and the command."""

import csv
import json
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrel.cli import main
from jaxrel.exit_codes import UsageError
from jaxrel.plan import mfu, peaks
from jaxrel.plan.architecture import parse

pytestmark = pytest.mark.core

# Published runs: source, architecture, throughput and percentage stand in each row.
ROWS = list(
    csv.DictReader((Path(__file__).parent / "mfu_rows.csv").read_text("utf-8").splitlines())
)
COLUMNS = ("layers", "hidden", "heads", "head_dim", "sequence", "vocabulary", "parameters")
REASONS = {
    "rate_only": "only FLOP/s were published: nothing to count, a division remains",
    "assumption": "the batch size was not published: it is assumed",
    "excluded: error in the source": "the published rate and percentage contradict each other",
}


def by_role(role: str) -> list[dict[str, str]]:
    return [row for row in ROWS if row["role"] == role]


def architecture(row: dict[str, str]) -> str:
    return ",".join(f"{name}={row[name]}" for name in COLUMNS if row[name])


def computed(row: dict[str, str], hardware: float | None = None) -> dict[str, Any]:
    """The document of a row, from architecture, convention, tokens, devices and peak alone."""
    count = mfu.counted(parse(architecture(row)), row["convention"], hardware)
    peak = peaks.given(float(row["peak_flops"]))
    return mfu.document(count, float(row["tokens_per_s"]), int(row["chips"]), peak)


def error_pp(row: dict[str, str]) -> float:
    """Percentage points between the computed and the published number."""
    return abs(100 * computed(row)[row["kind"].lower()] - float(row["published_pct"]))


def test_every_published_row() -> None:
    rows = by_role("oracle")
    wrong = [r["model"] for r in rows if error_pp(r) > abs(float(r["abs_err_pp"])) + 0.02]
    assert (len(rows), wrong) == (153, [])
    assert statistics.median(map(error_pp, rows)) < 0.02


def test_every_other_row_has_its_reason() -> None:
    others = Counter(row["role"] for row in ROWS if row["role"] != "oracle")
    assert others == {"rate_only": 16, "assumption": 1, "excluded: error in the source": 2}
    assert set(others) == set(REASONS)
    (assumed,) = by_role("assumption")
    assert error_pp(assumed) < 0.02
    for row in by_role("rate_only"):
        share = mfu.mfu(float(row["throughput"]) * 1e12, 1.0, 1, float(row["peak_flops"]))
        assert share is not None
        error = abs(100 * share - float(row["published_pct"]))
        assert error <= abs(float(row["abs_err_pp"])) + 0.02
    for row in by_role("excluded: error in the source"):
        share = float(row["throughput"]) * 1e12 / float(row["peak_flops"])
        assert abs(100 * share - float(row["published_pct"])) > 3


def test_published_hfu_of_llm_foundry() -> None:
    """Activation checkpointing runs the forward pass twice: 4/3 of the model FLOPs."""
    tested = 0
    for row in by_role("oracle"):
        noted = re.search(r"act_ckpt=(\w+); HFU=([\d.]+)", row["note"])
        if noted is None:
            continue
        model = mfu.counted(parse(architecture(row)), row["convention"]).model
        hardware = model * (4 / 3 if noted[1] == "True" else 1)
        assert 100 * computed(row, hardware)["hfu"] == pytest.approx(float(noted[2]), abs=0.02)
        tested += 1
    assert tested == 129


def test_a_count_of_hardware_flops_gives_both() -> None:
    """Korthikanti et al., arXiv 2205.05198, table 5: 175B, MFU 51.4%, HFU 52.8%."""
    rows = [r for r in by_role("oracle") if r["convention"] == "korthikanti_selective_hfu"]
    made = computed(rows[1])
    assert round(100 * made["mfu"], 1) == 51.4
    assert round(100 * made["hfu"], 1) == 52.8
    assert "attention recomputed" in made["definition"] and "72 L h^2 (1 + s/6h" in str(made)
    with pytest.raises(UsageError, match="^hardware_flops_per_token: got 1: .* leave it out$"):
        computed(rows[1], 1.0)


POSITIVE = st.floats(1e-3, 1e18)


@given(POSITIVE, POSITIVE, st.integers(1, 10**6), POSITIVE)
def test_a_share_or_nothing(flops: float, tokens: float, devices: int, peak: float) -> None:
    share = mfu.mfu(flops, tokens, devices, peak)
    assert share is None or 0 <= share <= 1
    if share is not None and share > 1e-300:
        assert mfu.mfu(flops, tokens, 2 * devices, peak) == pytest.approx(share / 2)
        assert mfu.mfu(flops, tokens, devices, 4 * peak) == pytest.approx(share / 4)
    assert mfu.mfu(flops, tokens, devices, None) is None


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["flops_per_token", "tokens_per_second", "devices", "peak_flops"])
def test_numbers_that_make_no_share(name: str, wrong: float) -> None:
    right: dict[str, Any] = {
        "flops_per_token": 1,
        "tokens_per_second": 1,
        "devices": 1,
        "peak_flops": 1,
    }
    with pytest.raises(UsageError, match=f"^{name}: got .*: expected a number above 0$"):
        right[name] = wrong
        mfu.mfu(**right)


@pytest.mark.parametrize(
    ("percent", "words"),
    [
        (100, "very good: above 50%"), (51, "very good: above 50%"),
        (50, "good: above the 38-43% of a published 405B run"),
        (44, "good: above the 38-43% of a published 405B run"),
        (43, "good: in the 38-43% of a published 405B run"),
        (38, "good: in the 38-43% of a published 405B run"),
        (37, "below the 38-43% of a published 405B run"),
        (25, "below the 38-43% of a published 405B run"),
        (24, "usually misconfigured: below 25%"), (1, "usually misconfigured: below 25%"),
    ],
)  # fmt: skip
def test_the_reading(percent: int, words: str) -> None:
    made = mfu.document(mfu.given(percent), 1.0, 1, peaks.given(100.0))
    assert made["mfu"] == percent / 100
    assert made["reading"].startswith(words)
    assert made["hfu"] is None


def test_more_than_one_is_never_shown() -> None:
    made = mfu.document(mfu.given(137.0, 60.0), 1.0, 1, peaks.given(100.0))
    assert (made["mfu"], made["hfu"]) == (None, 0.6)
    assert made["reading"].startswith("invalid: MFU above 1; check FLOPs per token")
    assert "1.37" not in str(made)
    assert mfu.text(made).splitlines()[0] == "MFU      invalid"
    made = mfu.document(mfu.given(60.0, 137.0), 1.0, 1, peaks.given(100.0))
    assert (made["mfu"], made["hfu"]) == (0.6, None)
    assert "very good" in made["reading"] and "invalid: HFU above 1" in made["reading"]
    assert mfu.text(made).splitlines()[:2] == ["MFU      60.00%", "HFU      invalid"]


PALM = "layers=118,heads=48,head_dim=256,sequence=2048,parameters=540.35e9"


def command(*flags: str) -> list[str]:
    return ["plan", "mfu", "--tokens-per-second", "238.3e3", "--devices", "6144", *flags]


def test_the_command_tells_all_that_the_number_depends_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """PaLM 540B, 46.2% (arXiv 2204.02311, table 3)."""
    counted = ("--architecture", PALM, "--convention", "palm_6n_attention")
    assert main(command(*counted, "--device-kind", "TPU v4", "--json")) == 0
    out, err = capsys.readouterr()
    made = json.loads(out)
    assert err == ""
    assert set(made) >= {"mfu", "hfu", "peak_flops", "peak_source", "definition", "reading"}
    assert round(100 * made["mfu"], 1) == 46.2
    assert made["model_flops_per_token"] == 3277734806784
    assert (made["hfu"], made["hardware_flops_per_token"]) == (None, None)
    assert made["peak_flops"] == 275e12
    for words in (
        "palm_6n_attention: 6N + 12 L H Q s",
        "attention: the full square",
        "embeddings: in N",
        "arXiv 2204.02311",
        "peak: 2.75e+14 FLOP/s a JAX device",
        made["peak_source"],
    ):
        assert words in made["definition"]


def test_the_command_takes_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--flops-per-token", "3277734806784", "--hardware-flops-per-token", "4e12")
    assert main(command(*flags, "--peak-flops", "275e12", "--json")) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["mfu"] == pytest.approx(0.46229, abs=1e-5)
    assert made["hfu"] == pytest.approx(4e12 * 238.3e3 / (6144 * 275e12))
    assert made["peak_source"] == "given by the user"
    assert "attention and embeddings as whoever gave them" in made["definition"]
    assert "hardware FLOPs a token as given" in made["definition"]


@pytest.mark.parametrize(
    ("kind", "dtype", "why"),
    [
        ("cpu", "bfloat16", "no device kind 'cpu' in the table"),
        ("TPU v4", "int4", "no peak of TPU v4 in 'int4' in the table"),
    ],
)
def test_an_unknown_peak_is_unknown_with_one_warning(
    kind: str, dtype: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--flops-per-token", "1e12", "--device-kind", kind, "--dtype", dtype)
    assert main(command(*flags, "--json")) == 0
    out, err = capsys.readouterr()
    made = json.loads(out)
    assert (made["mfu"], made["hfu"], made["peak_flops"]) == (None, None, None)
    assert err == f"jaxrel: warning: unknown: {why}; give the peak FLOP/s of a device\n"
    assert f"peak: unknown: {why}" in made["definition"]
    assert main(command(*flags)) == 0
    assert capsys.readouterr().out.splitlines()[0] == "MFU      unknown"


def test_an_invalid_share_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--flops-per-token", "1e14", "--device-kind", "TPU v4")
    assert main(command(*flags, "--json")) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["mfu"] is None
    assert err.startswith("jaxrel: warning: invalid: MFU above 1") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--peak-flops 1e12", "flops_per_token: got nothing: expected either flops_per_token or"),
        ("--flops-per-token 1 --architecture a=1 --peak-flops 1", "flops_per_token: got architect"),
        ("--flops-per-token 1", "device_kind: got nothing: expected either device_kind or peak"),
        ("--flops-per-token 1 --device-kind x --peak-flops 1", "device_kind: got peak_flops as"),
        ("--architecture layers=1 --peak-flops 1", "convention: got nothing: expected it and"),
        ("--flops-per-token 1 --convention megatron --peak-flops 1", "convention: got 'megatron'"),
        (
            "--architecture layers=1,hidden=2 --convention megatron --peak-flops 1",
            "architecture: got no sequence, vocabulary: this convention needs layers, hidden, seq",
        ),
        ("--flops-per-token 1 --peak-flops 0", "peak_flops: got 0: expected FLOP/s of one device"),
        ("--flops-per-token x --peak-flops 1", "flops_per_token: got 'x': expected a number"),
        ("--flops-per-token -1 --peak-flops 1", "flops_per_token: got -1: expected a number abov"),
        ("--flops-per-token nan --peak-flops 1", "flops_per_token: got 'nan': expected a number"),
        ("--flops-per-tokn 1", "--flops-per-tokn: got '1': unknown flag; did you mean --flops-per"),
    ],
)
def test_wrong_commands(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(*flags.split())) == 64
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"jaxrel: {message}")


def test_the_room_never_imports_jax() -> None:
    rooms = "architecture, bubble, conventions, mfu, peaks"
    code = f"import sys; from jaxrel.plan import {rooms}; peaks.peak('cpu')"
    code += "; sys.exit('jax' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
