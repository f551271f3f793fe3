"""What a campaign writes, and how it goes on after it was interrupted."""

import json
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxrel.provenance import write_atomically
from scripts.campaigns.workers import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def once(folder: Path, act: Callable[[Path], Any]) -> Any:
    """What `act(folder)` gave, as JSON types; from the record if it is complete already.

    `act` gets a new folder below `folder`: one that an interrupted campaign left is kept aside.
    """
    record = folder / "outcome.json"
    if not record.exists():
        attempt = folder / f"attempt-{len(list(folder.glob('attempt-*')))}"
        attempt.mkdir(parents=True)
        write_atomically(record, json.dumps(act(attempt), default=_plain))
    return json.loads(record.read_text())


def state_folder(campaign: str) -> Path:
    """Where a campaign that is interrupted finds what it has done: with this Python, at this
    revision, so that no result is of another's work."""
    python = ".".join(platform.python_version_tuple()[:2])
    revision = _git("rev-parse", "--short", "HEAD") or "unknown"
    return ROOT / "runs" / f"{campaign}-python{python}-{revision}"


def write_result(campaign: str, seed: int, result: dict[str, Any]) -> Path:
    """Write `result` with where, when and with what it was made; returns the file."""
    version = ".".join(platform.python_version_tuple()[:2])
    document = {
        "campaign": campaign,
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": _git("rev-parse", "HEAD"),
        "uncommitted": _git("status", "--porcelain", "--", "jaxrel", "scripts").splitlines(),
        "machine": {"cores": os.cpu_count(), "cpu": _cpu(), "platform": platform.platform()},
        "versions": {"python": platform.python_version()}
        | {package: metadata.version(package) for package in PACKAGES},
        **result,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{campaign}-python{version}-seed{seed}.json"
    write_atomically(path, json.dumps(document, indent=1) + "\n")
    return path


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(": ")[1] for x in lines if x.startswith("model name")), "unknown")
