"""Kills in the middle of a save: a sample of `scripts/campaign save-kills`, and its judge."""

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.campaigns import save_kills as campaign

SAMPLE = [
    campaign.Trial(0, 2, "bytes", nth=2, fraction=0.4),
    campaign.Trial(1, 2, "operation", nth=2, fraction=0.75),  # retention is at its deletions
    campaign.Trial(2, 2, "operation", nth=1, fraction=0.6),  # begins by sweeping what they left
    campaign.Trial(3, 2, "time", nth=3, fraction=0.5),
]


def test_a_kill_in_a_save_leaves_good_checkpoints_and_the_next_save_leaves_nothing_else(
    tmp_path: Path,
) -> None:
    outcomes = list(campaign.carry_out(SAMPLE, tmp_path))
    assert [campaign.judge(outcome) for outcome in outcomes] == [[]] * len(SAMPLE)
    found = [outcome.found for outcome in outcomes]
    assert {"writing", "deleting an older one"} & set(found)  # or the kills missed


def test_the_judge_sees_what_is_wrong() -> None:
    look = campaign.Look(good=[4, 5], bad=[], newest=5)
    right = campaign.Outcome(SAMPLE[0], 6, 5, "writing", look, [["4", "5"]])

    def wrong(**other: object) -> list[str]:
        return campaign.judge(replace(right, look=replace(look, **other)))

    assert campaign.judge(right) == []
    assert campaign.judge(replace(right, before=6)) == ["older than before"]
    assert wrong(newest=4) == ["older than before", "not the newest good one"]
    assert wrong(bad=["3: corrupt its manifest is gone"]) == ["not good"]
    assert wrong(good=[5]) == ["fewer than two good ones"]
    for names in (["4", "5", "6"], ["5"], ["5", "4.orbax-checkpoint-tmp-old"]):
        assert campaign.judge(replace(right, left=[["4", "5"], names])) == ["left over"]


def test_a_wrong_value_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with campaign.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, campaign.state(step, campaign.SAVED_ON))
    assert campaign.look(tmp_path) == campaign.Look([1, 2], [], 2)
    (tmp_path / "2" / "manifest" / "metadata").unlink()
    seen = campaign.look(tmp_path)
    assert (seen.good, seen.newest, len(seen.bad)) == ([1], 1, 1)
    same = campaign.state
    monkeypatch.setattr(campaign, "state", lambda step, devices: same(step + 1, devices))
    assert len(campaign.look(tmp_path).bad) == 3


def test_moments_are_drawn_from_the_seed_alone() -> None:
    trials = campaign.draw(0, 60)
    assert trials == campaign.draw(0, 60) != campaign.draw(1, 60)
    assert trials[:9] == campaign.draw(0, 9)
    for keep in campaign.KEEPS:
        moments = [trial.moment for trial in trials if trial.keep == keep]
        assert {moments.count(moment) for moment in campaign.MOMENTS} == {10}
