"""What the tests of whole processes share: one compilation cache, one undisturbed run."""

from pathlib import Path
from typing import Any

import pytest

from scripts.campaigns import kills


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which started processes find what others compiled."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> dict[str, Any]:
    """What comes of the small run on 8 devices, and its `run` directory: copy it, leave it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return kills.undisturbed(folder, compiled) | {"run": folder / "run"}
