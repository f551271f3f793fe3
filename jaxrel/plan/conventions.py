"""Published ways to count the FLOPs of one token of training, by name.

L layers, h hidden, H heads, Q head_dim, s sequence, V vocabulary, N parameters (those that are
active, where `active_parameters` is given). A multiply-add is two FLOPs and the backward pass costs
twice the forward pass, so a weight costs 6 a token. Attention multiplies two s x s matrices a head:
12 L H Q s a token when the full square counts, half of it when only what a causal mask leaves does.

Two conventions differ by several points of MFU for the same run, so no count travels without its
`definition`. Those of the Megatron papers are made for one shape (MLP of 4h, as many key and value
heads as query heads, H Q = h) and ignore any other; the two of MaxText count each matrix that is
there, grouped queries, experts and latent attention included. For dense models Megatron-LM and NeMo
today count the same as `maxtext_causal`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxrel.config import show
from jaxrel.exit_codes import UsageError
from jaxrel.plan.architecture import Architecture

_FULL = "the full square, not halved for the causal mask"
_HALF = "half the square, what the causal mask leaves"
_PAPER = "its shape: MLP of 4h, key and value heads = heads, heads x head_dim = h"


@dataclass(frozen=True)
class Convention:
    """A way to count, and the words that travel with its numbers."""

    flops: Callable[[Architecture], int]
    formula: str
    attention: str
    embeddings: str
    source: str
    model: str | None = None
    """Of a count of hardware FLOPs (recomputation included): the one of its model FLOPs."""

    @property
    def kind(self) -> Literal["MFU", "HFU"]:
        """Which utilisation its FLOPs give: of the model, or of the hardware."""
        return "HFU" if self.model else "MFU"

    @property
    def definition(self) -> str:
        """Formula, attention, embeddings and source in one line."""
        return (
            f"{self.formula}; attention: {self.attention}; embeddings: {self.embeddings};"
            f" source: {self.source}"
        )


def flops_per_token(architecture: Architecture, convention: str) -> int:
    """FLOPs of training on one token, forward and backward, exact, by a convention of `BY_NAME`.

    Hardware FLOPs when the convention's `kind` is "HFU", else model FLOPs. Raises UsageError
    that names what the architecture lacks.
    """
    return find(convention).flops(architecture)


def find(name: str) -> Convention:
    """The convention called `name`. Raises UsageError."""
    if name not in BY_NAME:
        raise UsageError(f"convention: got {show(name)}: expected one of {', '.join(BY_NAME)}")
    return BY_NAME[name]


def _active(a: Architecture) -> int:
    """N. With experts all parameters will not do: a token meets a part of them."""
    if a.active_parameters is None and a.experts is None:
        return a.take("parameters")[0]
    return a.take("active_parameters")[0]


def _square(a: Architecture) -> int:
    """12 L H Q s."""
    layers, heads, head_dim, sequence = a.take("layers", "heads", "head_dim", "sequence")
    return 12 * layers * heads * head_dim * sequence


def _palm(a: Architecture) -> int:
    return 6 * _active(a) + _square(a)


def _torchtitan(a: Architecture) -> int:
    hidden, vocabulary = a.take("hidden", "vocabulary")
    return 6 * (_active(a) - vocabulary * hidden) + _square(a)


def _llm_foundry(a: Architecture) -> int:
    layers, hidden, sequence = a.take("layers", "hidden", "sequence")
    lookup = hidden * a.take("vocabulary")[0] if a.tied is False else 0
    return 6 * (_active(a) - lookup) + 12 * layers * hidden * sequence


def _megatron(blocks: int, square: int) -> Callable[[Architecture], int]:
    """`blocks` L h^2 + `square` L h s + 6 h V: blocks, attention, logits."""

    def flops(a: Architecture) -> int:
        layers, h, s, v = a.take("layers", "hidden", "sequence", "vocabulary")
        return blocks * layers * h * h + square * layers * h * s + 6 * h * v

    return flops


def _maxtext(causal: bool) -> Callable[[Architecture], int]:
    """6 a matrix element that the token meets, and 6 L s a score and value column."""

    def flops(a: Architecture) -> int:
        layers, hidden, sequence, vocabulary = a.take("layers", "hidden", "sequence", "vocabulary")
        projections, columns = (_plain if a.kv_lora_rank is None else _latent)(a)
        weights = layers * projections + _feed_forward(a) + hidden * vocabulary
        square = 6 * layers * sequence * columns
        return 6 * weights + (square // 2 if causal else square)

    return flops


def _plain(a: Architecture) -> tuple[int, int]:
    """Elements of a layer's attention matrices; columns of its scores and values, all heads."""
    hidden, heads, kv_heads, head_dim = a.take("hidden", "heads", "kv_heads", "head_dim")
    return 2 * hidden * (heads + kv_heads) * head_dim, 2 * heads * head_dim


def _latent(a: Architecture) -> tuple[int, int]:
    """As `_plain`, of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    hidden, heads, rank, nope, rope, value, q_rank = a.take(
        "hidden", "heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        "q_lora_rank",
    )  # fmt: skip
    qk = heads * (nope + rope)
    query = q_rank * (hidden + qk) if q_rank else hidden * qk
    key_value = hidden * (rank + rope) + rank * heads * (nope + value)
    return query + key_value + hidden * heads * value, qk + heads * value


def _feed_forward(a: Architecture) -> int:
    """Elements of the feed-forward matrices that a token meets, routers included, all layers."""
    layers, hidden, matrices = a.take("layers", "hidden", "mlp_matrices")
    if a.experts is None:
        return layers * matrices * hidden * a.take("mlp")[0]
    experts, met = a.take("experts", "experts_per_token")
    width = a.take("mlp")[0] if a.expert_mlp is None else a.expert_mlp
    dense = a.dense_layers or 0
    met += a.shared_experts or 0
    made = (layers - dense) * hidden * (experts + met * matrices * width)
    return made + (dense * matrices * hidden * a.take("mlp")[0] if dense else 0)


BY_NAME = {
    "palm_6n": Convention(
        lambda a: 6 * _active(a),
        "6N",
        "left out",
        "in N, a tied one once",
        "PaLM, arXiv 2204.02311, section 4.1",
    ),
    "palm_6n_attention": Convention(
        _palm,
        "6N + 12 L H Q s",
        _FULL,
        "in N, a tied one once",
        "PaLM, arXiv 2204.02311, appendix B",
    ),
    "llama3": Convention(
        _palm,
        "6N + 12 L H Q s",
        _FULL,
        "in N",
        "Llama 3, arXiv 2407.21783, section 3.3.2, which takes PaLM's definition",
    ),
    "megatron": Convention(
        _megatron(72, 12),
        "72 L h^2 (1 + s/6h + V/12Lh)",
        _FULL,
        f"input out, output (logits) in; {_PAPER}",
        "Megatron, Korthikanti et al., arXiv 2205.05198",
    ),
    "megatron_causal": Convention(
        _megatron(72, 6),
        "72 L h^2 (1 + s/12h + V/12Lh)",
        _HALF,
        f"input out, output (logits) in; {_PAPER}",
        "MegaScale, arXiv 2402.15627, table 2: Megatron's with causal attention",
    ),
    "megatron_full_recompute": Convention(
        _megatron(96, 16),
        "96 L h^2 (1 + s/6h + V/16Lh), the blocks' forward pass counted twice",
        _FULL,
        f"input out, output (logits) in; {_PAPER}",
        "Megatron, Narayanan et al., SC21, arXiv 2104.04473",
        model="megatron",
    ),
    "korthikanti_selective_hfu": Convention(
        _megatron(72, 24),
        "72 L h^2 (1 + s/3h + V/12Lh), attention recomputed, as printed",
        _FULL,
        f"input out, output (logits) in; {_PAPER}",
        "Megatron, Korthikanti et al., arXiv 2205.05198",
        model="megatron",
    ),
    "llm_foundry": Convention(
        _llm_foundry,
        "6N + 12 L h s",
        _FULL,
        "in N; the input one out when tied=false",
        "MosaicML llm-foundry, scripts/train/benchmarking and flops_per_batch of MPT",
    ),
    "torchtitan": Convention(
        _torchtitan,
        "6 (N - V h) + 12 L H Q s",
        _FULL,
        "input out (V h), output in when it is not tied",
        "torchtitan, get_nparams_and_flops; Llama 3.1 benchmarks of December 2024",
    ),
    "maxtext": Convention(
        _maxtext(causal=False),
        "6 a weight of a matrix that the token meets + 12 L H Q s",
        _FULL,
        "input out, output (logits) in",
        "MaxText, calculate_tflops_training_per_device before its causal change (PR 1988, 2025)",
    ),
    "maxtext_causal": Convention(
        _maxtext(causal=True),
        "6 a weight of a matrix that the token meets + 6 L H Q s",
        _HALF,
        "input out, output (logits) in",
        "MaxText, calculate_tflops_training_per_device since its causal change (PR 1988, 2025)",
    ),
}
"""Every convention, by the name that `--convention` takes."""
