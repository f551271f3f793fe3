"""A damaged checkpoint is refused, or gives exactly what was saved; never anything else."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrel.checkpoint import Checkpointer
from jaxrel.exit_codes import DataRefusedError
from tests.checkpoint import states

# Orbax leaves coroutines behind when a read fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

WIDTH = 64  # the parts of `w` are too large to stand inside Orbax's own index


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("saved")
    with Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            state = states.make(step, states.mesh(4, 2), WIDTH)
            checkpointer.save(step, state)
    return directory, state


@pytest.fixture
def copy(saved: tuple[Path, Any], tmp_path: Path) -> Callable[[], Path]:
    """A fresh copy of the sound directory."""

    def fresh() -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return Path(shutil.copytree(saved[0], tmp_path / "copy"))

    return fresh


def restore(directory: Path, step: int = 2) -> Any:
    return Checkpointer(directory).restore(states.abstract(states.mesh(2, 2), WIDTH), step)[0]


def data_files(directory: Path) -> list[Path]:
    """Files of step 2 that hold values of arrays, the largest first."""
    files = (directory / "2" / "state").rglob("d/*")
    return sorted(files, key=lambda file: -file.stat().st_size)


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.mark.core
@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_bit_is_refused_and_its_leaf_named(
    saved: tuple[Path, Any], copy: Callable[[], Path], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    directory = copy()
    part = np.asarray(saved[1]["params"]["w"].addressable_shards[rng.integers(8)].data).tobytes()
    (file,) = [file for file in data_files(directory) if part in file.read_bytes()]
    start = file.read_bytes().index(part)
    flip(file, 8 * start + int(rng.integers(8 * len(part))))
    with pytest.raises(DataRefusedError, match="digests differ in params/w$"):
        restore(directory)
    assert states.bits(restore(directory, 1)) == states.bits(
        states.make(1, states.mesh(2, 2), WIDTH)
    )


def test_no_flipped_bit_gives_a_wrong_value(
    saved: tuple[Path, Any], copy: Callable[[], Path]
) -> None:
    """Anywhere in any file of the step."""
    rng = np.random.default_rng(0)
    expected, refused = states.bits(saved[1]), 0
    directory = copy()
    files = sorted(file for file in (directory / "2").rglob("*") if file.is_file())
    for trial in range(60):
        file = files[trial % len(files)]
        bit = int(rng.integers(8 * file.stat().st_size))
        flip(file, bit)
        try:
            assert states.bits(restore(directory)) == expected, (file, bit)
        except DataRefusedError:
            refused += 1
        flip(file, bit)
    assert refused > 10
    assert states.bits(restore(directory)) == expected


@pytest.mark.parametrize("damage", ["truncate", "delete", "zero"])
def test_broken_files_are_refused(copy: Callable[[], Path], damage: str) -> None:
    directory = copy()
    file = data_files(directory)[0]
    size = file.stat().st_size
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[: size // 2])
    elif damage == "delete":
        file.unlink()
    else:
        file.write_bytes(bytes(size))
    with pytest.raises(
        DataRefusedError, match=r"checkpoint .*/2 (cannot be read|is corrupt): .+"
    ) as caught:
        restore(directory)
    assert len(str(caught.value)) < 800 and "\n" not in str(caught.value)


def test_a_missing_part_is_refused(copy: Callable[[], Path]) -> None:
    for part in ("manifest.ocdbt", "_METADATA"):
        directory = copy()
        (directory / "2" / "state" / part).unlink()
        with pytest.raises(DataRefusedError, match="checkpoint .*/2 cannot be read"):
            restore(directory)
    directory = copy()
    shutil.rmtree(directory / "2" / "state")
    with pytest.raises(DataRefusedError):
        restore(directory)


def test_the_arrays_of_another_step_are_refused(copy: Callable[[], Path]) -> None:
    directory = copy()
    shutil.rmtree(directory / "2" / "state")
    shutil.copytree(directory / "1" / "state", directory / "2" / "state")
    with pytest.raises(DataRefusedError, match="digests differ in bytes; .* more$"):
        restore(directory)


@pytest.mark.parametrize("leaf", ["params/bias", "rng"])
def test_a_leaf_read_as_another_type_is_refused(copy: Callable[[], Path], leaf: str) -> None:
    """The same bits under another dtype, as the storage might give them, are not the same."""
    checkpointer = Checkpointer(copy())
    read = checkpointer._arrays.restore

    def other_type(*args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        arrays = read(*args, **kwargs)
        return arrays | {leaf: jax.lax.bitcast_convert_type(arrays[leaf], np.int32)}

    checkpointer._arrays.restore = other_type  # type: ignore[method-assign]
    with pytest.raises(DataRefusedError, match=f"is corrupt: {leaf}: saved as int32.*wanted"):
        checkpointer.restore(states.abstract(states.mesh(2, 2), WIDTH))
