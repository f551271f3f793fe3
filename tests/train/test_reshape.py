"""Other devices, processes and axes on the way: a sample of `scripts/campaign reshape`."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from scripts.campaigns import reshape
from scripts.campaigns.reshape import Leg
from scripts.campaigns.workers import SMALL

LEGS = [Leg(1, 8), Leg(2, 4, 2), Leg(1, 2, 2, 2)]


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes_and_axes(
    tmp_path: Path, compiled: Path, undisturbed: dict[str, Any]
) -> None:
    steps = SMALL["run.steps"]
    found = reshape.carry_out(LEGS, tmp_path, compiled, steps)
    assert reshape.judge(found, LEGS, reshape.history(undisturbed["run"])) == []
    assert 2 * reshape.LEG <= reshape.exact_steps(found, LEGS) < steps
    assert found["final_digest"] != undisturbed["final_digest"]  # the tensor degree is felt


def test_the_judge_sees_what_is_wrong() -> None:
    legs = [Leg(1, 8), Leg(2, 4, 2), Leg(1, 2, 2, 2)]
    reference = {
        "steps": [[step, 5.0 - step / 10, 1.0] for step in range(1, 13)],
        "digests": [[step, f"{step:032x}"] for step in range(1, 13)],
    }
    starts = [
        {"step": 0, "resumed": [0, 8, 1, {"data": 8, "fsdp": 1, "tensor": 1}]},
        {"step": 4, "resumed": [4, 8, 2, {"data": 4, "fsdp": 2, "tensor": 1}]},
        {"step": 8, "resumed": [8, 8, 1, {"data": 2, "fsdp": 2, "tensor": 2}]},
    ]
    for begun in starts:
        digest = f"{begun['step']:032x}" if begun["step"] else None
        begun |= {"saved_digest": digest, "resumed_digest": digest, "restored_here": ""}
    right = {"starts": starts, "steps": deepcopy(reference["steps"])}
    right["digests"] = [[4, f"{4:032x}"], [8, f"{8:032x}"], [12, "other"]]
    right["steps"][11][1] *= 1 + reshape.TOLERANCE / 2
    assert reshape.judge(right, legs, reference) == []

    def wrong(change: str) -> list[str]:
        found = deepcopy(right)
        exec(change, {"found": found})
        return reshape.judge(found, legs, reference)

    assert wrong("found['steps'][7][2] += 1e-15") == ["exact loss or norm"]
    assert wrong("found['steps'][8][2] += 1e-15") == []
    assert wrong("found['steps'][8][1] *= 1.01") == ["loss or norm within the tolerance"]
    assert wrong("found['steps'].insert(5, found['steps'][5])") == ["each step once"]
    assert wrong("found['digests'][1][1] = 'other'") == ["exact digest"]
    assert wrong("found['starts'][1]['resumed_digest'] = 'other'") == ["digest after a restore"]
    assert wrong("found['starts'][2]['resumed'][3]['tensor'] = 1") == ["step or mesh of a start"]
    assert wrong("found['starts'][2]['restored_here'] = 'other bits'") == ["bits of a restore"]
