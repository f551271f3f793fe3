"""A small corpus of several files, longer than one record."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxrel.data.corpus import build

WORDS = "of and the step shard group batch token window epoch seed order file text".split()


@pytest.fixture(scope="session")
def write_texts() -> Callable[..., dict[str, bytes]]:
    """Writes files of random words in nested folders: content by relative path."""

    def write(folder: Path, files: int, words: int) -> dict[str, bytes]:
        rng = np.random.default_rng(0)
        texts = {}
        for i in range(files):
            text = " ".join(rng.choice(WORDS, words)) + f"\nend of {i} \u2713\n"
            texts[f"{'abc'[i % 3]}/{i:03}.txt"] = text.encode()
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text)
        return texts

    return write


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory, write_texts: Callable) -> Path:
    folder = tmp_path_factory.mktemp("data") / "texts"
    write_texts(folder, files=24, words=300)
    return folder


@pytest.fixture(scope="session")
def corpus(texts: Path) -> Path:
    """About 40,000 tokens in 24 files."""
    return build([texts], texts.parent / "corpus", held_out=0.2).path
