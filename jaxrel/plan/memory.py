"""What the state of a model in training weighs, from the number of its parameters."""

import textwrap
from typing import Any, Literal

from jaxrel.exit_codes import UsageError

Gradients = Literal["float32", "bfloat16"]

_GRADIENTS = {"float32": 4, "bfloat16": 2}
_KINDS = {
    "parameters": "bfloat16 parameters",
    "gradients": "gradients",
    "moments": "two float32 moments",
    "master": "float32 master copy",
}


def document(parameters: int, devices: int = 1, gradients: Gradients = "float32") -> dict[str, Any]:
    """What `plan memory --json` prints: bytes by kind, and a device's share of each.

    The kinds are those of mixed-precision Adam (Rajbhandari et al., ZeRO, arXiv 1910.02054,
    section 3.1): 2 bytes a parameter for bfloat16 parameters, 2 or 4 for gradients, 8 for two
    float32 moments and 4 for the float32 master copy. Raises UsageError.
    """
    for name, value in {"params": parameters, "devices": devices}.items():
        if value < 1:
            raise UsageError(f"{name}: got {value}: expected at least 1")
    if gradients not in _GRADIENTS:
        raise UsageError(f"gradients: got {gradients!r}: expected float32 or bfloat16")
    sizes = {"parameters": 2, "gradients": _GRADIENTS[gradients], "moments": 8, "master": 4}
    share = -(-parameters // devices)
    whole = {kind: size * parameters for kind, size in sizes.items()}
    part = {kind: size * share for kind, size in sizes.items()}
    return {
        "parameters": parameters,
        "devices": devices,
        "bytes": whole,
        "optimizer_bytes": whole["moments"] + whole["master"],
        "total_bytes": sum(whole.values()),
        "bytes_per_device": part,
        "total_bytes_per_device": sum(part.values()),
        "definition": (
            f"bytes of bfloat16 parameters, {gradients} gradients, two float32 moments and the"
            " float32 master copy; optimizer_bytes: moments and master copy; a device holds an"
            " equal shard of each kind; 1 GB is 10**9 bytes; activations, temporaries and what"
            " is gathered for a layer come on top"
        ),
    }


def table(document: dict[str, Any]) -> str:
    """The document for a terminal, in decimal GB."""
    whole, part = document["bytes"], document["bytes_per_device"]
    rows = [(words, whole[kind], part[kind]) for kind, words in _KINDS.items()]
    rows.append(("total", document["total_bytes"], document["total_bytes_per_device"]))
    head = f"{document['parameters']:,} parameters"
    over = f"a device of {document['devices']}"
    width = max(len(head), 24)
    lines = [f"{head:<{width}}  {'GB':>12}  {over:>20}"]
    lines += [f"{name:<{width}}  {a / 1e9:>12,.3f}  {b / 1e9:>20,.3f}" for name, a, b in rows]
    return "\n".join([*lines, "", textwrap.fill(document["definition"], 96)])
