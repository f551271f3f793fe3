"""Samples that fail: a reason, nothing raised, nothing left behind."""

import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrel.throughput.device_split import DeviceSplit
from jaxrel.throughput.profile_step import Sampler, profiled

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where samples put their folders; it must be empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def step() -> None:
    jax.block_until_ready(jnp.ones((64, 64)) @ jnp.ones((64, 64)))


def still_works(temporary: Path) -> None:
    """Neither a folder nor a session is left."""
    assert list(temporary.iterdir()) == []
    assert isinstance(profiled(step), DeviceSplit)
    assert list(temporary.iterdir()) == []


def test_who_profiles_already_is_left_alone(temporary: Path, tmp_path: Path) -> None:
    jax.profiler.start_trace(str(tmp_path / "theirs"))
    sampler, runs = Sampler(), []
    assert not sampler.begin()
    sampler.mark()
    assert sampler.end() is None
    assert "already been started" in (sampler.reason or "")
    found = profiled(lambda: runs.append(1))
    assert isinstance(found, str)
    assert "already been started" in found
    assert runs == [1]
    jax.profiler.stop_trace()
    assert list((tmp_path / "theirs").rglob("*.xplane.pb"))
    still_works(temporary)


def test_a_session_that_someone_else_stopped(temporary: Path) -> None:
    sampler = Sampler()
    sampler.begin()
    jax.profiler.stop_trace()
    assert sampler.end() is None
    assert "No profile started" in (sampler.reason or "")
    still_works(temporary)


@pytest.mark.parametrize(
    "damage", [b"", b"\x0a\xff\xff junk", b"planes", None], ids=["empty", "cut", "text", "absent"]
)
def test_a_damaged_trace(
    damage: bytes | None, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = jax.profiler.stop_trace

    def stop_and_damage() -> None:
        stop()
        (file,) = temporary.rglob("*.xplane.pb")
        file.unlink() if damage is None else file.write_bytes(damage)

    with monkeypatch.context() as patch:
        patch.setattr(jax.profiler, "stop_trace", stop_and_damage)
        found = profiled(step)
    assert isinstance(found, str)
    assert found
    still_works(temporary)


def test_a_profiler_that_fails(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no profiler here")

    with monkeypatch.context() as patch:
        patch.setattr(jax.profiler, "start_trace", fail)
        assert profiled(step) == "OSError: no profiler here"
    still_works(temporary)


def test_a_reason_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no profiler here")

    sampler = Sampler()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(jax.profiler, "start_trace", fail)
        for _ in range(3):
            assert not sampler.begin()
            assert sampler.end() is None
    assert [record.getMessage() for record in caplog.records] == [
        "no device split of this step: OSError: no profiler here"
    ]
    sampler.begin()
    step()
    assert sampler.end() is not None
    assert sampler.reason is None
    assert sampler.cost_s > 0


def test_a_sample_that_was_given_up_makes_way(temporary: Path) -> None:
    sampler = Sampler()
    assert sampler.begin()
    assert sampler.begin()
    assert sampler.reason is None
    assert len(list(temporary.iterdir())) == 1
    step()
    assert sampler.end() is not None
    assert sampler.end() is None
    still_works(temporary)


def test_what_the_step_raises_is_raised(temporary: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        profiled(lambda: 1 // 0)
    still_works(temporary)


def test_reading_survives_warnings_as_errors() -> None:
    code = (
        "import jax, jax.numpy as jnp, warnings\n"
        "from jaxrel.throughput.profile_step import profiled\n"
        "x = jnp.ones((8, 8))\n"
        "warnings.simplefilter('error')\n"
        "print(type(profiled(lambda: jax.block_until_ready(x @ x))).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["DeviceSplit"]
