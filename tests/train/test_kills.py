"""SIGKILL at random moments: a sample of `scripts/campaign kills`, and what its judge sees."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.campaigns import kills

SAMPLE = {t.moment: t for t in kills.draw(seed=2, count=len(kills.MOMENTS))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "devices"),
    [
        ("step", (8, 4)),
        pytest.param("save", (4, 8), marks=pytest.mark.core),
        ("start-up of a resume", (8, 4, 8)),
    ],
)
def test_a_killed_run_ends_as_if_nobody_had_touched_it(
    tmp_path: Path,
    compiled: Path,
    undisturbed: dict[str, Any],
    moment: str,
    devices: tuple[int, ...],
) -> None:
    """The device counts are not drawn here, so that little is compiled."""
    trial = replace(SAMPLE[moment], devices=devices)
    found = kills.carry_out(trial, tmp_path, compiled)
    assert kills.judge(found, undisturbed) == []
    assert [a.killed is not None for a in found["attempts"]] == [True] * (len(devices) - 1) + [
        False
    ]


def test_the_judge_sees_what_is_wrong(undisturbed: dict[str, Any]) -> None:
    right = undisturbed | {"batches": deepcopy(kills.ordered_batches())}
    assert kills.judge(right, undisturbed) == []
    again = deepcopy(right["batches"])
    again[5] = again[4]
    assert kills.judge(right | {"batches": again}, undisturbed) == ["batches consumed"]
    one_group = deepcopy(right["batches"])
    one_group[5][3] = one_group[4][3]
    assert kills.judge(right | {"batches": one_group}, undisturbed) == ["batches consumed"]
    other = right | {"final_digest": "0" * 32, "positions": [4, 8, 12, 15]}
    assert kills.judge(other, undisturbed) == ["final digest", "data position"]
    lost = right | {"progress": [*right["progress"][:-1], None]}
    assert kills.judge(lost, undisturbed) == ["loss of a step"]


def test_an_attempt_counts_until_where_the_next_one_resumed(tmp_path: Path) -> None:
    first, second = (kills.Attempt(pid, 8, start, None, []) for pid, start in ((10, 0), (11, 4)))
    assert [own for _, own in kills.lineage([first, second])] == [range(4), range(4, kills.STEPS)]
    log = tmp_path / "reads"
    lines = ["10 0 0 probe", "11 0 0 probe"]
    for pid, steps in ((10, range(6)), (11, range(4, kills.STEPS))):
        lines += [f"{pid} {g} {s} {pid}-{g}-{s}" for s in steps for g in range(kills.GROUPS)]
    log.write_text("\n".join(lines) + "\n")
    table = kills.batches([first, second], log)
    assert [row[2] for row in table[3:5]] == ["10-2-3", "11-2-4"]
    assert len(table) == kills.STEPS
    log.write_text(log.read_text() + "11 3 0 11-3-0\n")  # from before its start
    with pytest.raises(AssertionError):
        kills.batches([first, second], log)


def test_moments_are_drawn_from_the_seed_alone() -> None:
    assert kills.draw(0, 12) == kills.draw(0, 12) != kills.draw(1, 12)
    assert kills.draw(0, 12)[:4] == kills.draw(0, 4)
    assert {t.moment for t in kills.draw(0, 12)} == set(kills.MOMENTS)
    assert {d for t in kills.draw(0, 12) for d in t.devices} == set(kills.DEVICES)
