"""What the tests of jobs that train share: one compilation cache, one undisturbed job."""

from pathlib import Path

import pytest

from tests.supervise import faulty
from tests.supervise.jobs import Finished, Launched

TWO_BY_FOUR = ("--hosts", "2", "--cpu-devices", "4", "--hang-floor", "5")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which started processes find what others compiled."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Finished:
    """The small run on 2 processes x 4 devices, which nobody touched: look, and leave it."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    with Launched(run, faulty.train(run, compiled), *TWO_BY_FOUR) as launched:
        done = launched.finish(300)
    assert (done.code, done.attempts) == (0, 1), done.text
    return done
