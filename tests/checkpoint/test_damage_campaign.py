"""Random damage: a sample of `scripts/campaign checkpoint-damage`, and what its judge sees."""

from pathlib import Path

import pytest

from jaxrel.checkpoint import candidates, listing, restoring
from scripts.campaigns import checkpoint_damage as campaign

# Orbax leaves coroutines behind when a read fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

EACH = len(campaign.MODELS) * len(campaign.DAMAGES)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    campaign.carry_out(0, 0, folder)
    return folder


def test_every_damage_to_every_model(sources: Path, tmp_path: Path) -> None:
    found = [campaign.trial(number, 7, sources, tmp_path) for number in range(2 * EACH)]
    assert [outcome for outcome in found if not outcome.ok] == []
    assert {o.outcome for o in found} == {"exact", "older", "refused"}
    assert len({(o.model, o.damage) for o in found}) == EACH


def test_the_judge_sees_a_silent_wrong_restore(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save draws its files' names, so what a trial hits differs from day to day; few miss."""
    monkeypatch.setattr(restoring, "_verify", lambda *_: None)  # as plain Orbax
    found = (campaign.trial(number, 7, sources, tmp_path) for number in range(EACH * 10))
    assert any(o.outcome == "exact" and not o.ok for o in found)


def test_the_judge_sees_a_good_one_given_up(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def oldest_first(self: candidates.Candidates) -> tuple[list[int], dict[str, str]]:
        return sorted(e.step for e in listing.scan(self.directory) if e.good), {}

    monkeypatch.setattr(candidates.Candidates, "judged", oldest_first)
    found = (campaign.trial(number, 7, sources, tmp_path) for number in range(EACH * 10))
    assert any(not o.ok for o in found)
