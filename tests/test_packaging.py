import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.core
ROOT = Path(__file__).parent.parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what decides about an installation."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/lock", tmp_path / "scripts/lock")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def check(project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, project / "scripts/lock", "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_locks_are_in_step(project: Path) -> None:
    done = check(project)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("pyproject.toml", '"rich>=14"', '"rich>=15"'),
        ("pyproject.toml", '"rich>=14",', ""),
        ("pyproject.toml", '"hypothesis",', '"hypothesis", "tensorboardX",'),
        ("pyproject.toml", 'requires-python = ">=3.11"', 'requires-python = ">=3.12"'),
        ("requirements/python3.12.txt", "\nrich==", "\nrich!="),
    ],
)
def test_a_change_on_either_side_shows(project: Path, name: str, old: str, new: str) -> None:
    path = project / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = check(project)
    assert done.returncode == 1
    assert "requirements/python3.12.txt: out of step with pyproject.toml" in done.stderr


def test_a_missing_lock_shows(project: Path) -> None:
    (project / "requirements/python3.13.txt").unlink()
    assert "requirements/python3.13.txt: missing: run scripts/lock" in check(project).stderr


def test_every_supported_python_has_a_lock_of_exact_pins_without_origins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = {c.split(" :: ")[-1] for c in project["classifiers"] if "Python :: 3." in c}
    files = {path.name for path in (ROOT / "requirements").iterdir()}
    assert files == {f"python{python}.txt" for python in pythons}
    for name in files:
        _, *pins = (ROOT / "requirements" / name).read_text().splitlines()
        assert len(pins) > 40
        assert all(re.fullmatch(r"[a-z0-9-]+(\[[a-z,]+\])?==[\w.]+( ;.*)?", pin) for pin in pins)


def test_the_wheel_holds_what_the_package_needs(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"jaxrel/cli/__init__.py", "jaxrel/py.typed", "jaxrel/configs/tiny.yaml"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "scripts")) for name in names)
