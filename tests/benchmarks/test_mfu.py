"""The benchmark of utilisation counts what it says, and shows no number that it does not have."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from benchmarks import mfu as benchmark
from benchmarks import mfu_published
from benchmarks.mfu import NUMBERS, SIZES
from jaxrel.models import transformer
from jaxrel.plan.peaks import Peak

# The quick model: 2 layers of width 32, 2 heads of 16 with keys of their own, a gated MLP of 96,
# 256 tokens; 16 rows of 16 tokens. Twice a multiply-add, and twice more in the backward pass.
TOKENS = 16 * 16
PROJECTIONS = 4 * 32 * (2 * 16)
FEED_FORWARD = 3 * 32 * 96
ATTENTION = 2 * (2 * 16) * 16
LAYERS = 2 * (PROJECTIONS + FEED_FORWARD + ATTENTION)
MODEL_FLOPS = 3 * 2 * TOKENS * (LAYERS + 32 * 256)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a smoke run writes."""
    out = tmp_path_factory.mktemp("mfu") / "result.json"
    returned = benchmark.main(["--quick", "--mesh", "8x1", "2x4", "--out", str(out)])
    written = json.loads(out.read_text("utf-8"))
    assert written == json.loads(json.dumps(returned))
    return written


def test_speed_is_tokens_over_the_median_step(quick: dict[str, Any]) -> None:
    assert [row["mesh"] for row in quick["rows"]] == [
        {"data": 8, "fsdp": 1},
        {"data": 2, "fsdp": 4},
    ]
    for row in quick["rows"]:
        step = row["step_s"]
        assert sorted(step["all"])[1] == step["median"] and len(step["all"]) == 3
        assert step["p10"] <= step["median"] <= step["p90"]
        assert row["tokens_per_step"] == TOKENS
        assert row["tokens_per_second"] == TOKENS / step["median"]
        assert row["tokens_per_second_per_device"] == row["tokens_per_second"] / 8


def test_flops_are_those_of_the_architecture(quick: dict[str, Any]) -> None:
    for row in quick["rows"]:
        assert row["model_flops_per_step"] == MODEL_FLOPS
        assert row["model_flops_per_token"] * TOKENS == MODEL_FLOPS
        full, causal = (row["conventions"][name] for name in ("maxtext", "maxtext_causal"))
        assert full["flops_per_token"] * TOKENS == MODEL_FLOPS
        saved = 3 * 2 * TOKENS * (2 * ATTENTION) // 2
        assert causal["flops_per_token"] * TOKENS == MODEL_FLOPS - saved
        assert row["counted_over_formula"] == 1
        # Each layer's forward pass is made once more, but for the product that ends it and that
        # no gradient needs.
        last = 2 * 2 * TOKENS * 32 * 96
        forward = 2 * TOKENS * LAYERS
        assert row["hardware_flops_per_step"] == MODEL_FLOPS + forward - last
        assert row["hardware_uncounted"] == []


def test_utilisation_is_of_a_measured_peak(quick: dict[str, Any]) -> None:
    assert len({row["peak_flops"] for row in quick["rows"]}) == 1
    for row in quick["rows"]:
        assert row["peak_source"].startswith("measured: ")
        assert "float32 matmul on 8 cpu devices at once" in row["peak_source"]
        possible = row["tokens_per_second"] / (8 * row["peak_flops"])
        for share, flops in (("mfu", MODEL_FLOPS), ("hfu", row["hardware_flops_per_step"])):
            if row[share] is None:
                assert "above 1" in row["reading"]
            else:
                assert 0 < row[share] <= 1
                assert row[share] == pytest.approx(flops / TOKENS * possible)
        assert row["conventions"]["maxtext"]["mfu"] == row["mfu"]
        assert "each computed once" in row["definition"] and "optimised HLO" in row["definition"]


def test_a_result_says_where_it_is_from(quick: dict[str, Any]) -> None:
    assert (quick["platform"], quick["device_count"], quick["processes"]) == ("cpu", 8, 1)
    assert quick["command"].startswith("python -m benchmarks.mfu --quick --mesh 8x1 2x4 --out")
    assert {"date", "cpu", "cores", "versions", "revision", "load_average"} <= set(quick)
    for row in quick["rows"]:
        assert row["memory"]["temporaries"] > 0 and row["memory"]["peak_in_use"] is None
        # Parameters and two moments, an eighth of each, are the most of it.
        assert 3 * 4 * row["parameters"] / 8 <= row["memory"]["arguments"] < 2 * row["parameters"]
        assert (row["dtype"], row["remat"], row["reduction"]) == ("float32", "full", "fast")
        assert 4 < row["loss"] < 8  # about ln 256 = 5.5, and finite


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("1b", 1_100_048_384), ("7b", 6_738_415_616)],  # as TinyLlama and Llama 2 are published
)
def test_sizes_are_of_known_models(size: str, parameters: int) -> None:
    assert _parameters(size) == parameters


@pytest.mark.parametrize(("size", "parameters"), [("125m", 125e6), ("350m", 350e6)])
def test_sizes_are_as_large_as_they_are_called(size: str, parameters: float) -> None:
    assert _parameters(size) == pytest.approx(parameters, rel=0.1)


def _parameters(size: str) -> int:
    made = jax.eval_shape(transformer.init_fn(SIZES[size].model), jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(made))


def test_flags_change_the_model_and_the_batch() -> None:
    given = benchmark.parser().parse_args(
        "--hidden 48 --kv-heads 1 --sequence 5 --batch 24 --groups 8 --remat dots --dtype bfloat16"
        " --reduction invariant".split()
    )
    config = benchmark.configuration(given, SIZES["tiny"], 2, 4)
    numbers = [getattr(config.model, name) for name in NUMBERS]
    assert numbers == [4, 48, 4, 1, 16, 192, 256]
    assert (config.model.remat, config.model.compute_dtype) == ("dots", "bfloat16")
    batch = config.batch
    assert (batch.global_size, batch.sequence, batch.groups) == (24, 5, 8)
    assert batch.reduction == "invariant" and config.model.dropout == 0
    plain = benchmark.configuration(benchmark.parser().parse_args([]), SIZES["125m"], 4, 1).batch
    assert (plain.global_size, plain.sequence, plain.groups) == (32, 2048, 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mesh 8", "mesh: got '8': expected data x fsdp, powers of two, as in 8x1"),
        ("--mesh 8x1 3x1", "mesh: got '3x1': expected data x fsdp, powers of two"),
        ("--mesh 0x1", "mesh: got '0x1': expected data x fsdp, powers of two"),
        ("--mesh 8x1 --batch 12", "batch.global_size: got 12: expected a multiple of batch.groups"),
        ("--mesh 32x1", "the degrees must multiply to the 8 devices there are"),
        ("--steps 0", "steps: got 0: expected at least 1"),
        ("--peak -1", "peak_flops: got -1: expected FLOP/s of one device"),
    ],
)
def test_wrong_flags_are_refused(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        benchmark.main(flags.split())
    assert left.value.code == 64
    assert message in capsys.readouterr().err


class Device:
    """As much of a `jax.Device` as the table needs."""

    device_kind = "TPU v4"


def test_a_known_device_is_judged_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = cast(Any, [Device()])
    assert benchmark.common_peak(None, "bfloat16", devices).flops == 275e12
    assert benchmark.common_peak(5.0, "bfloat16", devices) == Peak(5.0, "given by the user")
    asked: list[Any] = []
    monkeypatch.setattr(
        benchmark, "device_peak", lambda *given: asked.append(given) or Peak(7.0, "measured: so")
    )
    unknown = tuple(jax.devices()[:2])
    for _ in range(2):
        assert benchmark.common_peak(None, "bfloat16", unknown) == Peak(7.0, "measured: so")
    assert asked == [("bfloat16", "measured", unknown)]  # once for all meshes of these devices
    benchmark._same_everywhere.cache_clear()


def test_the_breakdown_is_of_the_trace_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    split = SimpleNamespace(
        step_s=2.0, compute_s=1.5, exposed_communication_s=0.5, callback_s=0.0, other_s=0.0,
        idle_s=0.0,
    )  # fmt: skip
    program = SimpleNamespace(as_text=lambda: "the text")
    asked: list[Any] = []
    monkeypatch.setattr(benchmark, "profiled", lambda act, texts: asked.append(texts) or split)
    found = benchmark.breakdown(lambda: None, program)
    assert found is not None and found["compute_s"] == 1.5 and asked == [["the text"]]
    assert benchmark._shares(found) == "compute 75%, exposed communication 25%"
    monkeypatch.setattr(benchmark, "profiled", lambda act, texts: "the profiler is in use")
    assert benchmark.breakdown(lambda: None, program) is None
    assert benchmark._shares(None) == "unknown"


def test_a_real_step_has_a_breakdown(quick: dict[str, Any]) -> None:
    for row in quick["rows"]:
        parts = row["breakdown"]
        others = sum(seconds for name, seconds in parts.items() if name != "step_s")
        assert others == pytest.approx(parts["step_s"], abs=1e-6)


@dataclass(frozen=True)
class Accelerator:
    """A device that tells what it holds."""

    process_index: int
    peak_bytes_in_use: int

    def memory_stats(self) -> dict[str, int]:
        """As `jax.Device` has it."""
        return {"bytes_in_use": 1, "peak_bytes_in_use": self.peak_bytes_in_use}


def test_memory_is_of_the_fullest_device_of_this_process() -> None:
    compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((10,), "float32")).compile()
    found = benchmark.memory(compiled, [Accelerator(0, 5), Accelerator(0, 7), Accelerator(1, 9)])
    assert (found["arguments"], found["peak_in_use"]) == (40, 7)


def test_what_is_not_known_or_not_possible_is_not_a_number(quick: dict[str, Any]) -> None:
    shown = benchmark._percent
    assert shown(0.5, 1.0) == "50.0%"
    assert shown(None, None) == shown(None, 1.0, None) == "unknown"
    assert shown(None, 1.0) == shown(None, 1.0, 2.0) == "invalid"
    row = quick["rows"][0]
    notes = benchmark.footnotes(quick["rows"])
    assert row["definition"] in "\n".join(notes) and len(notes) == 1 + 2 + 1


def test_published_numbers_come_out_again(capsys: pytest.CaptureFixture[str]) -> None:
    made = mfu_published.main([])
    found = {(row["name"], row["convention"], row["devices"]): row for row in made["published"]}
    assert len(found) == len(mfu_published.WELL_KNOWN) == 13
    # arXiv 2204.02311, table 3; arXiv 2205.05198, table 5.
    assert found["PaLM 540B", "palm_6n_attention", 6144]["recomputed"] == pytest.approx(
        0.462, abs=5e-4
    )
    assert found["175B", "korthikanti_selective_hfu", 64]["recomputed"] == pytest.approx(
        0.528, abs=5e-4
    )
    for row in found.values():
        # torchtitan's are printed as whole percents.
        allowed = 1.0 if row["convention"] == "torchtitan" else 0.25
        assert abs(cast(float, mfu_published.difference(row))) < allowed
    out = capsys.readouterr().out
    assert re.search(
        r"PaLM 540B +TPU v4 +6,144 +MFU +palm_6n_attention +46.20% +46.23% +\+0.03", out
    )
    assert out.count("palm_6n_attention  6N + 12 L H Q s;") == 1


def test_published_rows_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(mfu_published.published(convention="llm_foundry")) == 129
    assert {row["name"] for row in mfu_published.published("mt-nlg")} == {"MT-NLG 530B"}
    with pytest.raises(SystemExit) as left:
        mfu_published.main(["--model", "nobody's"])
    assert left.value.code == 64 and "expected those of a row" in capsys.readouterr().err


def test_ours_stand_beside_by_every_convention_that_fits(
    quick: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "ours.json", tmp_path / "out.json"
    slow = {**quick, "rows": [{**row, "peak_flops": 1e15, "mfu": 0.25} for row in quick["rows"]]}
    file.write_text(json.dumps(slow), "utf-8")
    mfu_published.main(["--ours", str(file), "--out", str(out)])
    rows = json.loads(out.read_text("utf-8"))["ours"]
    assert len(rows) == 2 * len(mfu_published.FOR_OURS)
    by_name = {row["convention"]: row for row in rows if row["name"] == "jaxrel quick, 8x1"}
    assert by_name["maxtext"]["published"] == 0.25 and by_name["palm_6n"]["published"] is None
    speed = slow["rows"][0]["tokens_per_second"]
    # Embedding and logits, layers with two norms, and the last norm.
    parameters = 2 * 256 * 32 + 2 * (PROJECTIONS + FEED_FORWARD + 2 * 32) + 32
    expected = {
        "palm_6n": 6 * parameters * speed / (8 * 1e15),
        "maxtext": MODEL_FLOPS / TOKENS * speed / (8 * 1e15),
    }
    for name, share in expected.items():
        assert by_name[name]["recomputed"] == pytest.approx(share)
    assert "jaxrel quick, 2x4" in capsys.readouterr().out


def test_a_smoke_of_ours_beside_the_published() -> None:
    made = mfu_published.main(["--quick", "--model", "PaLM"])
    counted = next(row for row in made["ours"] if row["convention"] == "maxtext")
    assert counted["name"] == "jaxrel quick, 1x8"
    assert counted["published"] == counted["recomputed"]
