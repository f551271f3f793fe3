"""The manifest: what a checkpoint says about itself, in JSON, inside Orbax's own commit.

    {"format": 1, "step": 20, "state_digest": "...", "checksum": "...", "extra": {...},
     "leaves": {"params/w": {"shape": [8, 4], "dtype": "float32", "digest": "..."}, ...},
     "nodes": {"": "TrainState", "params": "dict", ...}, "metric": 1.5,
     "mesh": {"data": 8}, "processes": 1, "versions": {"jax": "...", ...}}

A leaf that is a typed random key has its shape as a key array and names its `key_impl`;
`nodes` are the types of what the leaves hang on; `checksum` covers all the rest, so that a
damaged manifest is noticed too. The last two lines are newer than the first: they may lack.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from jaxrel.checkpoint.errors import DamagedError
from jaxrel.exit_codes import DataRefusedError

FORMAT = 1
ITEM = "manifest"
"""Name of the item, a folder inside the step's folder."""
FILE = "metadata"
"""The file in which Orbax's JSON handler keeps an item."""


class NotOursError(ValueError):
    """A JSON item that jaxrel did not write."""


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """`manifest` as it will be read back, with its checksum; ValueError if it is not JSON."""
    plain = json.loads(json.dumps(manifest, allow_nan=False))
    return {**plain, "checksum": _checksum(plain)}


def read(path: epath.Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, a step's folder.

    Raises FileNotFoundError where there is none, NotOursError for another program's item,
    DamagedError for one that is damaged or of another step, DataRefusedError for one of a newer
    format.
    """
    try:
        found = json.loads((path / ITEM / FILE).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DamagedError(f"checkpoint {path}: its manifest is damaged ({error})") from error
    return checked(found, f"checkpoint {path}", path.name.partition(".")[0])


def checked(found: Any, where: str, step: str) -> dict[str, Any]:
    """`found` if it is a sound manifest of that step; raises as `read`, with `where` it is from."""
    if not isinstance(found, dict) or not {"format", "checksum"} & set(found):
        raise NotOursError(f"{where}: not a manifest of jaxrel")
    plain = {name: value for name, value in found.items() if name != "checksum"}
    if found.get("checksum") != _checksum(plain):
        raise DamagedError(f"{where}: its manifest is damaged (checksum differs)")
    if "format" not in found:
        raise DamagedError(f"{where}: in its manifest's place is something else")
    if found["format"] != FORMAT:
        raise DataRefusedError(
            f"{where}: format {found['format']}, this version reads format {FORMAT}"
        )
    if str(found["step"]) != step:
        raise DamagedError(f"{where}: its manifest is that of step {found['step']}")
    return found


def differences(
    saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """A phrase for each leaf whose path, shape or dtype differs; the dtype names a key's kind."""
    found = {}
    for path in sorted({*saved, *wanted}):
        if path not in wanted:
            found[path] = f"{path}: only in the checkpoint"
        elif path not in saved:
            found[path] = f"{path}: not in the checkpoint"
        elif _kind(saved[path]) != _kind(wanted[path]):
            found[path] = f"{path}: saved as {_kind(saved[path])}, wanted {_kind(wanted[path])}"
    return found


def castable(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether the two leaves differ in nothing but a dtype of numbers."""
    keys = any(leaf["dtype"].startswith("key<") for leaf in (saved, wanted))
    return saved["shape"] == wanted["shape"] and not keys


def _kind(leaf: Mapping[str, Any]) -> str:
    return f"{leaf['dtype']} {list(leaf['shape'])}"


def _checksum(plain: Mapping[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
