"""The numbers of a decoder-only transformer that conventions of counting FLOPs are made of."""

import dataclasses
import difflib
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from jaxrel.config import show
from jaxrel.exit_codes import UsageError
from jaxrel.plan.quantities import count

_MOST = 10**18
_MAY_BE_ZERO = ("dense_layers", "shared_experts", "q_lora_rank")
_NOT_ABOVE = (
    ("active_parameters", "parameters"),
    ("dense_layers", "layers"),
    ("experts_per_token", "experts"),
)
_ONLY_WITH = {
    "experts": ("experts_per_token", "shared_experts", "expert_mlp", "dense_layers"),
    "kv_lora_rank": ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture: whole numbers, those that the convention needs; what is None is not known.

    Nothing is derived from what is not given: `head_dim` is not hidden / heads, as Gemma and Qwen
    show. Raises UsageError for what cannot be.
    """

    layers: int | None = None
    """Transformer blocks."""
    hidden: int | None = None
    """Width of the residual stream."""
    heads: int | None = None
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads; as many as `heads` without grouped queries."""
    head_dim: int | None = None
    """Width of one head."""
    mlp: int | None = None
    """Width of the feed-forward layer."""
    mlp_matrices: int | None = None
    """Matrices of a feed-forward layer: 3 when gated (SwiGLU), else 2."""
    sequence: int | None = None
    """Tokens in a sequence."""
    vocabulary: int | None = None
    """Rows of the embedding."""
    parameters: int | None = None
    """All parameters, embeddings included; a tied embedding counts once."""
    active_parameters: int | None = None
    """Of a mixture of experts: the parameters that one token passes through."""
    tied: bool | None = None
    """Whether the output layer is the input embedding."""
    experts: int | None = None
    """Routed experts of a layer; none in a dense model."""
    experts_per_token: int | None = None
    """Routed experts that a token goes through."""
    shared_experts: int | None = None
    """Experts that every token goes through."""
    expert_mlp: int | None = None
    """Width of one expert; `mlp` when not given."""
    dense_layers: int | None = None
    """Layers that have no experts in a model that has them elsewhere."""
    q_lora_rank: int | None = None
    """Latent attention: rank of the query; 0 when it has none."""
    kv_lora_rank: int | None = None
    """Latent attention: rank of keys and values; given, it makes attention latent."""
    qk_nope_head_dim: int | None = None
    """Latent attention: width of a query and key head without position."""
    qk_rope_head_dim: int | None = None
    """Latent attention: width of its part with position."""
    v_head_dim: int | None = None
    """Latent attention: width of a value head."""

    def __post_init__(self) -> None:
        for name in NAMES:
            value = getattr(self, name)
            if value is not None and name != "tied":
                object.__setattr__(self, name, _checked(name, value))
        for base, names in _ONLY_WITH.items():
            given = [name for name in names if getattr(self, name) is not None]
            if given and getattr(self, base) is None:
                raise UsageError(f"architecture: got {given[0]} alone: expected {base} beside it")
        for name, bound in _NOT_ABOVE:
            low, high = getattr(self, name), getattr(self, bound)
            if low is not None and high is not None and low > high:
                raise UsageError(
                    f"architecture: got {name}={low}: expected at most {bound}, {high}"
                )

    def take(self, *names: str) -> list[int]:
        """The values of `names`. Raises UsageError that names every one that is missing."""
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            raise UsageError(
                f"architecture: got no {', '.join(missing)}: this convention needs"
                f" {', '.join(names)}"
            )
        return [getattr(self, name) for name in names]


NAMES = tuple(field.name for field in dataclasses.fields(Architecture))
"""What `parse` takes."""


def parse(text: str) -> Architecture:
    """The architecture in `text`: NAME=VALUE,... with the fields of `Architecture`.

    Numbers may be 540350000000, 540.35e9 or 540.35B; `tied` is true or false. Raises UsageError.
    """
    given: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in NAMES:
            close = difflib.get_close_matches(name, NAMES, n=1)
            right = f"did you mean {close[0]}?" if close else f"expected {', '.join(NAMES)}"
            raise UsageError(f"architecture: got {show(name)}: unknown name; {right}")
        if not equals or not value:
            raise UsageError(f"architecture: got {show(item)}: expected {name}=NUMBER")
        if name in given:
            raise UsageError(f"architecture: got {name} twice: expected it once")
        given[name] = _flag(value) if name == "tied" else _whole(value, name)
    return Architecture(**given)


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise UsageError(f"architecture: got tied={show(text)}: expected true or false")
    return text == "true"


def _whole(text: str, name: str) -> int:
    """A count, also in the form 540.35e9."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)[eE]\+?([0-9]{1,2})", text, re.ASCII)
    if not found:
        return count(text, f"architecture: {name}")
    number = Decimal(found[1]).scaleb(int(found[2]))
    if number > _MOST or number != int(number):
        raise UsageError(f"architecture: {name}: got {show(text)}: expected a whole number")
    return int(number)


def _checked(name: str, value: Any) -> int:
    """A whole number in range; 540.35e9 is one."""
    least = 0 if name in _MAY_BE_ZERO else 1
    right = not isinstance(value, bool) and least <= value <= _MOST and value == int(value)
    if not right:
        raise UsageError(
            f"architecture: got {name}={value}: expected a whole number from {least} on"
        )
    return int(value)
