"""What a pipeline loses while it fills and drains."""

import textwrap
from typing import Any

from jaxrel.exit_codes import UsageError


def over_ideal(stages: int, microbatches: int, interleave: int = 1) -> float:
    """Idle time over the time of the work, (p - 1) / (v m), of a device in a step.

    p stages, m microbatches, v model chunks a device (Narayanan et al., SC21, arXiv 2104.04473,
    section 2.2), for GPipe and 1F1B alike. Raises UsageError.
    """
    given = {"stages": stages, "microbatches": microbatches, "interleave": interleave}
    for name, value in given.items():
        if value < 1:
            raise UsageError(f"{name}: got {value}: expected at least 1")
    return (stages - 1) / (interleave * microbatches)


def document(stages: int, microbatches: int, interleave: int = 1) -> dict[str, Any]:
    """What `plan bubble --json` prints; shares of time. Raises UsageError."""
    ratio = over_ideal(stages, microbatches, interleave)
    return {
        "bubble_over_ideal": ratio,
        "bubble_fraction": ratio / (1 + ratio),
        "definition": (
            "bubble_over_ideal: idle time over the time of the work, (p-1)/(v m), with p stages,"
            " m microbatches and v model chunks a device; bubble_fraction: idle time over all"
            " time, b/(1+b); stages of equal time, no time for sends; an interleaved schedule"
            " needs a multiple of p microbatches"
        ),
    }


def text(document: dict[str, Any]) -> str:
    """The document for a terminal."""
    return "\n".join(
        [
            f"bubble  {document['bubble_over_ideal']:.2%} of the time of the work",
            f"        {document['bubble_fraction']:.2%} of all time",
            "",
            textwrap.fill(document["definition"], 96),
        ]
    )
