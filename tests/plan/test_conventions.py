"""FLOPs per token against published rows, and against counts made by hand."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrel.exit_codes import UsageError
from jaxrel.plan.architecture import NAMES, Architecture, parse
from jaxrel.plan.conventions import BY_NAME, find, flops_per_token

pytestmark = pytest.mark.core

# Published runs: source, architecture, throughput and percentage stand in each row.
ROWS = list(
    csv.DictReader((Path(__file__).parent / "mfu_rows.csv").read_text("utf-8").splitlines())
)
COLUMNS = ("layers", "hidden", "heads", "head_dim", "sequence", "vocabulary", "parameters")


def architecture(row: dict[str, str]) -> Architecture:
    return parse(",".join(f"{name}={row[name]}" for name in COLUMNS if row[name]))


def numbered(role: str) -> list:
    """The rows of a role, each with the line that it stands on."""
    rows = enumerate(ROWS, start=2)
    return [pytest.param(row, id=f"line{line}") for line, row in rows if row["role"] == role]


@pytest.mark.parametrize("row", [*numbered("oracle"), *numbered("assumption")])
def test_a_published_row(row: dict[str, str]) -> None:
    counted = flops_per_token(architecture(row), row["convention"])
    assert counted == pytest.approx(int(row["flops_per_token"].split(".")[0]), rel=1e-6)
    assert find(row["convention"]).kind == row["kind"]


LLAMA_3 = {
    "8B": Architecture(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, mlp_matrices=3,
        sequence=8192, vocabulary=128256, parameters=8030261248, tied=False,
    ),
    "70B": Architecture(
        layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, mlp=28672, mlp_matrices=3,
        sequence=8192, vocabulary=128256, parameters=70553706496, tied=False,
    ),
    "405B": Architecture(
        layers=126, hidden=16384, heads=128, kv_heads=8, head_dim=128, mlp=53248, mlp_matrices=3,
        sequence=8192, vocabulary=128256, parameters=405853388800, tied=False,
    ),
}  # fmt: skip


# 6N, 6(N - V h) and the full square of attention, counted from Meta's published shapes.
@pytest.mark.parametrize(
    ("size", "six_n", "without_lookup", "square"),
    [
        ("8B", 48181567488, 45029548032, 12884901888),
        ("70B", 423322238976, 417018200064, 64424509440),
        ("405B", 2435120332800, 2422512254976, 202937204736),
    ],
)
def test_llama_3(size: str, six_n: int, without_lookup: int, square: int) -> None:
    shape = LLAMA_3[size]
    assert flops_per_token(shape, "palm_6n") == six_n
    assert flops_per_token(shape, "palm_6n_attention") == six_n + square
    assert flops_per_token(shape, "llama3") == six_n + square
    assert flops_per_token(shape, "torchtitan") == without_lookup + square
    assert flops_per_token(shape, "llm_foundry") == without_lookup + square  # h = H Q, not tied
    norms = (2 * shape.take("layers")[0] + 1) * shape.take("hidden")[0]  # no matrices
    assert flops_per_token(shape, "maxtext") == without_lookup - 6 * norms + square
    assert flops_per_token(shape, "maxtext_causal") == without_lookup - 6 * norms + square // 2


def test_the_compute_of_llama_3_405b() -> None:
    """3.8e25 FLOPs for 15.6T tokens (arXiv 2407.21783, section 1)."""
    assert 15.6e12 * flops_per_token(LLAMA_3["405B"], "palm_6n") == 3.798787719168e25


# GPT-3 175B as MegaScale trains it (arXiv 2402.15627): L = 96, h = 12288, s = 2048, V = 64000.
# L h^2 = 14495514624, L h s = 2415919104, h V = 786432000.
@pytest.mark.parametrize(
    ("convention", "flops"),
    [
        ("megatron", 72 * 14495514624 + 12 * 2415919104 + 6 * 786432000),
        ("megatron_causal", 72 * 14495514624 + 6 * 2415919104 + 6 * 786432000),
        ("megatron_full_recompute", 96 * 14495514624 + 16 * 2415919104 + 6 * 786432000),
        ("korthikanti_selective_hfu", 72 * 14495514624 + 24 * 2415919104 + 6 * 786432000),
    ],
)
def test_gpt_3_by_megatron(convention: str, flops: int) -> None:
    shape = Architecture(layers=96, hidden=12288, sequence=2048, vocabulary=64000)
    assert flops_per_token(shape, convention) == flops


def test_the_papers_form_of_megatron() -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh) of a step (SC21, appendix), here one token of it."""
    layers, h, s, v = 105, 20480, 2048, 51200
    shape = Architecture(layers=layers, hidden=h, sequence=s, vocabulary=v)
    printed = 96 * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert flops_per_token(shape, "megatron_full_recompute") == pytest.approx(printed, rel=1e-12)
    selective = 72 * layers * h**2 * (1 + s / (3 * h) + v / (12 * layers * h))
    assert flops_per_token(shape, "korthikanti_selective_hfu") == pytest.approx(selective)


def test_plain_blocks_are_counted_alike_by_megatron_and_maxtext() -> None:
    """MLP of 4h, all heads with keys and values of their own, H Q = h: Megatron's own shape."""
    shape = Architecture(
        layers=7, hidden=96, heads=6, kv_heads=6, head_dim=16, mlp=384, mlp_matrices=2,
        sequence=50, vocabulary=301,
    )  # fmt: skip
    for before, after in (("megatron", "maxtext"), ("megatron_causal", "maxtext_causal")):
        assert flops_per_token(shape, before) == flops_per_token(shape, after)


def test_heads_wider_than_the_stream() -> None:
    """Gemma 7B: H Q = 4096, h = 3072. By hand, of 28 layers, 8192 tokens, 256000 rows."""
    shape = Architecture(
        layers=28, hidden=3072, heads=16, kv_heads=16, head_dim=256, mlp=24576, mlp_matrices=3,
        sequence=8192, vocabulary=256000, parameters=8537680896, tied=True,
    )  # fmt: skip
    square = 12 * 28 * 4096 * 8192
    assert flops_per_token(shape, "palm_6n_attention") == 6 * 8537680896 + square
    assert flops_per_token(shape, "torchtitan") == 6 * (8537680896 - 786432000) + square
    assert flops_per_token(shape, "llm_foundry") == 6 * 8537680896 + 12 * 28 * 3072 * 8192
    weights = 28 * (4 * 3072 * 4096 + 3 * 3072 * 24576) + 3072 * 256000
    assert flops_per_token(shape, "maxtext") == 6 * weights + square


MIXTRAL: dict[str, Any] = {
    "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 14336,
    "mlp_matrices": 3, "sequence": 4096, "vocabulary": 32000, "parameters": 46702792704,
    "active_parameters": 12879925248, "experts": 8, "experts_per_token": 2, "tied": False,
}  # fmt: skip


def test_experts_count_where_a_token_goes() -> None:
    """Mixtral 8x7B (arXiv 2401.04088): 47B parameters, 13B active."""
    shape = Architecture(**MIXTRAL)
    square = 12 * 32 * 4096 * 4096
    assert flops_per_token(shape, "palm_6n") == 6 * 12879925248
    assert flops_per_token(shape, "torchtitan") == 6 * (12879925248 - 131072000) + square
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    weights = 32 * (attention + 2 * 3 * 4096 * 14336 + 4096 * 8) + 4096 * 32000
    assert flops_per_token(shape, "maxtext") == 6 * weights + square
    norms = 65 * 4096
    assert weights + norms + 4096 * 32000 == 12879925248  # all that a token meets, and the lookup


def test_all_parameters_of_experts_are_never_taken() -> None:
    shape = replace(Architecture(**MIXTRAL), active_parameters=None)
    for name in ("palm_6n", "palm_6n_attention", "llama3", "torchtitan", "llm_foundry"):
        with pytest.raises(UsageError, match="got no active_parameters"):
            flops_per_token(shape, name)


def test_latent_attention_shared_experts_and_dense_layers() -> None:
    """DeepSeek-V3 (arXiv 2412.19437) at 4096 tokens: 250.45 GFLOPs causal, 281.15 not."""
    shape = Architecture(
        layers=61, hidden=7168, heads=128, mlp=18432, mlp_matrices=3, sequence=4096,
        vocabulary=129280, experts=256, experts_per_token=8, shared_experts=1, expert_mlp=2048,
        dense_layers=3, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    assert flops_per_token(shape, "maxtext_causal") == pytest.approx(250.45e9, rel=1e-5)
    assert flops_per_token(shape, "maxtext") == pytest.approx(281.15e9, rel=1e-5)
    lite = replace(shape, q_lora_rank=0)  # one matrix in place of two
    change = 7168 * 128 * 192 - 1536 * (7168 + 128 * 192)
    assert flops_per_token(lite, "maxtext") - flops_per_token(shape, "maxtext") == 6 * 61 * change


DENSE = st.fixed_dictionaries(
    {name: st.integers(1, 512) for name in COLUMNS if name != "parameters"}
    | {"parameters": st.integers(10**6, 10**9), "kv_heads": st.integers(1, 64)}
    | {"mlp": st.integers(1, 4096), "mlp_matrices": st.sampled_from([2, 3])}
)


@pytest.mark.parametrize("name", BY_NAME)
@given(shape=DENSE, more=st.integers(1, 9))
def test_linear_in_layers_and_in_the_sequence(name: str, shape: dict[str, Any], more: int) -> None:
    """A layer more or a token more in the sequence always costs the same."""
    for grown in ("layers", "sequence"):
        first, second, third = (
            flops_per_token(Architecture(**(shape | {grown: shape[grown] + steps})), name)
            for steps in (0, more, 2 * more)
        )
        assert third - second == second - first >= 0


@pytest.mark.parametrize("name", ["megatron", "maxtext"])
@given(shape=DENSE)
def test_the_causal_mask_halves_attention_alone(name: str, shape: dict[str, Any]) -> None:
    """It takes half of what grows with the sequence, and nothing else."""
    short, long = (replace(Architecture(**shape), sequence=tokens) for tokens in (2, 4))
    full, causal = (
        flops_per_token(long, n) - flops_per_token(short, n) for n in (name, f"{name}_causal")
    )
    assert full == 2 * causal > 0
    less = flops_per_token(short, name) - flops_per_token(short, f"{name}_causal")
    assert less == causal


@pytest.mark.parametrize("name", BY_NAME)
def test_a_definition_names_attention_embeddings_and_source(name: str) -> None:
    convention = find(name)
    words = convention.definition
    assert "attention: " in words and "embeddings: " in words and "source: " in words
    assert "h^2" in words or "N" in words or "weight" in words
    square = {"palm_6n": "left out"}.get(name, "half the" if "causal" in name else "the full")
    assert f"attention: {square}" in words
    assert convention.kind == ("HFU" if name.endswith(("hfu", "recompute")) else "MFU")


NEEDS = {
    "palm_6n": "parameters",
    "palm_6n_attention": "layers heads head_dim sequence parameters",
    "llama3": "layers heads head_dim sequence parameters",
    "megatron": "layers hidden sequence vocabulary",
    "megatron_causal": "layers hidden sequence vocabulary",
    "megatron_full_recompute": "layers hidden sequence vocabulary",
    "korthikanti_selective_hfu": "layers hidden sequence vocabulary",
    "llm_foundry": "layers hidden sequence parameters",
    "torchtitan": "layers hidden heads head_dim sequence vocabulary parameters",
    "maxtext": "layers hidden heads kv_heads head_dim mlp mlp_matrices sequence vocabulary",
    "maxtext_causal": "layers hidden heads kv_heads head_dim mlp mlp_matrices sequence vocabulary",
}


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_missing_is_named(name: str) -> None:
    whole: dict[str, Any] = {
        column: 10**6 if column == "parameters" else 8 for column in NEEDS[name].split()
    }
    assert flops_per_token(Architecture(**whole), name) > 0
    for column in NEEDS[name].split():
        lacking = Architecture(**{k: v for k, v in whole.items() if k != column})
        with pytest.raises(UsageError, match=f"^architecture: got no {column}: .* needs "):
            flops_per_token(lacking, name)


def test_an_untied_lookup_needs_its_size() -> None:
    with pytest.raises(UsageError, match="got no vocabulary"):
        flops_per_token(
            parse("layers=1,hidden=2,sequence=3,parameters=4,tied=false"), "llm_foundry"
        )


def test_an_unknown_convention() -> None:
    with pytest.raises(UsageError, match="^convention: got 'palm': expected one of palm_6n, "):
        flops_per_token(Architecture(parameters=1), "palm")


def test_architectures_are_read() -> None:
    made = parse("layers=118, heads=48,head_dim=256,sequence=2K,parameters=540.35e9,tied=false")
    assert made == Architecture(
        layers=118, heads=48, head_dim=256, sequence=2000, parameters=540350000000, tied=False
    )
    assert Architecture(parameters=540.35e9) == parse("parameters=540.35B")  # pyright: ignore
    assert type(Architecture(parameters=540.35e9).parameters) is int  # pyright: ignore


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer=1", "architecture: got 'layer': unknown name; did you mean layers?"),
        ("", f"architecture: got '': unknown name; expected {', '.join(NAMES)}"),
        ("layers=1,", f"architecture: got '': unknown name; expected {', '.join(NAMES)}"),
        ("layers", "architecture: got 'layers': expected layers=NUMBER"),
        ("layers=", "architecture: got 'layers=': expected layers=NUMBER"),
        ("layers=1,layers=2", "architecture: got layers twice: expected it once"),
        ("layers=0", "architecture: got layers=0: expected a whole number from 1 on"),
        ("layers=-1", "architecture: layers: got '-1': expected a whole number, or one with K, M"),
        ("layers=1.5e0", "architecture: layers: got '1.5e0': expected a whole number"),
        ("layers=1e99", "architecture: layers: got '1e99': expected a whole number"),
        ("layers=nan", "architecture: layers: got 'nan': expected a whole number, or one with"),
        ("tied=yes", "architecture: got tied='yes': expected true or false"),
        ("expert_mlp=2", "architecture: got expert_mlp alone: expected experts beside it"),
        ("v_head_dim=2", "architecture: got v_head_dim alone: expected kv_lora_rank beside it"),
        (
            "experts=2,experts_per_token=3",
            "architecture: got experts_per_token=3: expected at most experts, 2",
        ),
        (
            "parameters=2,active_parameters=3",
            "architecture: got active_parameters=3: expected at most parameters, 2",
        ),
    ],
)
def test_wrong_architectures(text: str, message: str) -> None:
    with pytest.raises(UsageError) as got:
        parse(text)
    assert str(got.value).startswith(message)


@pytest.mark.parametrize("value", [1.5, float("nan"), float("inf"), True, 0, 2e18])
def test_numbers_that_are_no_counts(value: float) -> None:
    with pytest.raises(UsageError, match="^architecture: got layers="):
        Architecture(layers=value)  # pyright: ignore


@given(st.text(alphabet="layers=tid,0123456789.eKMB ", max_size=24))
def test_anything_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        parse(text)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
