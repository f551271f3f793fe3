"""Where a run came from, and what may never change while it lives.

A run directory holds `config.yaml`, the resolved configuration of the newest start, and
`provenance.json`: the newest start at the top level and the earlier ones, newest first,
under `attempts`. An attempt that lacks `patch` had the same patch as the one after it.
"""

import dataclasses
import json
import os
import platform
import shlex
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxrel
from jaxrel.config import Config, show
from jaxrel.config_file import parse, to_yaml
from jaxrel.exit_codes import DataRefusedError, UsageError

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

_HEADER = "# Written by jaxrel at every start of this run: the configuration in full.\n"
_MAX_PATCH = 1 << 20  # characters; a larger patch is cut, and says so
_GIT_DEADLINE_S = 20.0


def provenance(
    config: Config,
    command: Sequence[str] = (),
    devices: Iterable[Any] = (),
    degrees: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """What this start of a run is made of, as JSON types.

    `command` is the command line. `devices` are the job's JAX devices: their `device_kind`s
    and processes are counted. `degrees` are the mesh's axes as resolved (default: as
    configured).
    The code is that of the working directory, when it is under git.
    """
    devices = list(devices)
    wanted = {name: getattr(config.mesh, name) for name in ("data", "fsdp", "tensor")}
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "directory": os.getcwd(),
        "command": shlex.join(command),
        "code": _code(Path.cwd()),
        "packages": _packages(),
        "device_kinds": dict(Counter(str(device.device_kind) for device in devices)),
        "degrees": dict(degrees) if degrees is not None else wanted | config.mesh.axes,
        "processes": len({device.process_index for device in devices}),
        "global_batch": config.batch.global_size,
        "config": dataclasses.asdict(config),
    }


def check_run(run_dir: str | Path, config: Config) -> None:
    """Refuse to continue a run with another batch, seed or model.

    Reads only, so every process may call it. Raises DataRefusedError naming the key and
    both values, and UsageError when `run_dir` holds a config.yaml of somebody else's.
    """
    path = Path(run_dir, "config.yaml")
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"run.dir: got {str(run_dir)!r}: {path} cannot be read: {error}") from None
    if not text.startswith(_HEADER):
        raise UsageError(
            f"run.dir: got {str(run_dir)!r}: it holds a config.yaml that no run wrote;"
            " expected a new directory or that of a run"
        )
    recorded = _lasting(parse(text, str(path)))
    for key, now in _lasting(dataclasses.asdict(config)).items():
        before = recorded.get(key, now)  # a key may be newer than the run
        if before != now:
            raise DataRefusedError(
                f"{key}: got {show(now)}: this run was started with {show(before)};"
                " keep that, or choose another run.dir"
            )


def changes(run_dir: str | Path, config: Config) -> list[str]:
    """What the run is trained with from now on and was not at its last start, a phrase each.

    Of values that may change: the optimizer's, the data's and `run.steps`. Reads only.
    """
    path = Path(run_dir, "config.yaml")
    try:
        before = parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return []
    now, found = dataclasses.asdict(config), []
    for section in ("run", "optimizer", "data"):
        for name, value in now[section].items():
            old = (before.get(section) or {}).get(name, value)
            old = tuple(old) if isinstance(value, tuple) else old
            if old != value and (section, name) not in (("run", "dir"), ("run", "compiled")):
                found.append(f"{section}.{name} {show(old)} -> {show(value)}")
    return found


def write_run_files(run_dir: str | Path, config: Config, record: Mapping[str, Any]) -> None:
    """Write `config.yaml` and `provenance.json` into `run_dir`, each at once or not at all.

    For one process of a job. `record` is what `provenance` gave; records of earlier starts
    are kept. How the processes of a job meet belongs to an attempt, not to the run, and is
    left out of `config.yaml`. Raises what `check_run` raises, DataRefusedError when
    provenance.json is damaged, and UsageError when the directory cannot be written.
    """
    check_run(run_dir, config)
    path = Path(run_dir, "provenance.json")
    job = dataclasses.replace(config.job, coordinator=None, process_id=None, num_processes=None)
    resolved = to_yaml(dataclasses.replace(config, job=job))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = dict(record) | {"attempts": _earlier(path, record)}
        write_atomically(path.with_name("config.yaml"), _HEADER + resolved)
        write_atomically(path, json.dumps(document, indent=1) + "\n")
    except OSError as error:
        where = f"run.dir: got {str(run_dir)!r}"
        raise UsageError(f"{where}: cannot be written: {error.strerror}") from None


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by `text`: after a crash it holds the old text or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # or the rename itself may be lost
    finally:
        os.close(directory)


def _lasting(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values that may never change while a run lives, by dotted key."""
    return {
        f"{section}.{name}": value
        for section in ("run", "batch", "model")
        for name, value in (config.get(section) or {}).items()
        if section != "run" or name == "seed"
    }


def _earlier(path: Path, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of earlier starts, newest first, without patches that did not change."""
    if not path.exists():
        return []
    try:
        last = json.loads(path.read_text(encoding="utf-8"))
        attempts = last.pop("attempts")
        if last["code"].get("patch") == record["code"].get("patch"):
            last["code"].pop("patch", None)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise DataRefusedError(f"{path}: is damaged: move it away to go on without it") from None
    return [last, *attempts]


def _packages() -> dict[str, str | None]:
    """Versions by name; None for a package that is not installed."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return {"python": platform.python_version(), "jaxrel": jaxrel.__version__} | found


def _code(directory: Path) -> dict[str, Any]:
    """The revision of the code in `directory`, and how the tree differs from it.

    `revision` is None where git does not answer; `patch` is None in a clean tree, and does
    not hold the files that git does not know, which are named in `untracked`.
    """
    status = _git(directory, "status", "--porcelain", "--untracked-files=normal")
    if status is None:
        return {"revision": None, "dirty": None, "untracked": [], "patch": None}
    patch = _git(directory, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") or None
    if patch and len(patch) > _MAX_PATCH:
        patch = f"{patch[:_MAX_PATCH]}\n(cut: {len(patch)} characters in all)\n"
    return {
        "revision": (_git(directory, "rev-parse", "HEAD") or "").strip() or None,
        "dirty": bool(status),
        "untracked": [line[3:] for line in status.splitlines() if line.startswith("?? ")],
        "patch": patch,
    }


def _git(directory: Path, *arguments: str) -> str | None:
    """What git prints, or None when it fails, is not there or does not answer in time."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=directory,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
