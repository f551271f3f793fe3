"""From one checkpoint on disk to a state on the devices, proven to be what was saved."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxrel.checkpoint import leaves, listing, manifest
from jaxrel.checkpoint.errors import DamagedError, may_pass, one_line, some
from jaxrel.checkpoint.together import together
from jaxrel.digest import leaf_digests, state_digest
from jaxrel.exit_codes import DataRefusedError, FailedError

_DENIED = ("Permission denied", "PERMISSION_DENIED", "UNAUTHENTICATED", "PermissionError")
_TRIES, _FIRST_PAUSE_S = 4, 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Allowed:
    """What a restore may change, by patterns of leaf paths as `params/*` (`fnmatch`)."""

    cast: Sequence[str] = ()
    """Leaves that may be wanted in another dtype; they are cast after their digest was right."""
    partial: Sequence[str] = ()
    """Leaves that may be in the checkpoint alone, and are left there, or in the state alone,
    and keep the value that they have there."""

    def refused(self, saved: Mapping[str, Any], template: Any) -> list[str]:
        """The differences between a manifest and a template that nobody allowed, a phrase each."""
        wanted, found = leaves.kinds(template), []
        valued = {p for p, x in leaves.by_path(template).items() if isinstance(x, jax.Array)}
        for path, phrase in manifest.differences(saved["leaves"], wanted).items():
            if path not in wanted:
                allowed = _any(path, self.partial)
            elif path not in saved["leaves"]:
                allowed = path in valued and _any(path, self.partial)
            else:
                castable = manifest.castable(saved["leaves"][path], wanted[path])
                allowed = castable and _any(path, self.cast)
            if not allowed:
                found.append(phrase)
        types = leaves.nodes(template)
        for path, name in saved.get("nodes", types).items():
            if path in types and types[path] != name and not _any(path, self.partial):
                found.append(f"{path or 'the state'}: saved as {name}, wanted {types[path]}")
        return found


def _any(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def read_state(
    handler: ocp.PyTreeCheckpointHandler, path: epath.Path, template: Any, allowed: Allowed
) -> tuple[Any, dict[str, Any]]:
    """The state in the step's folder `path`, placed as `template` says, and its manifest.

    Collective. `template` has `jax.ShapeDtypeStruct`s, or arrays where the checkpoint may lack a
    leaf. Raises DataRefusedError where its leaves differ from the checkpoint's, DamagedError
    where they are not what was saved.
    """
    found = together(lambda: read_manifest(path, template, allowed))

    def read(specs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        return together(lambda: _read_arrays(handler, path, specs, found["leaves"]))

    return placed(f"checkpoint {path}", template, found, read), found


def placed(
    where: str,
    template: Any,
    found: Mapping[str, Any],
    read: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, jax.Array]],
) -> Any:
    """The state that `found`, a manifest that fits `template`, tells of; `read` has its arrays."""
    saved = found["leaves"]
    specs = leaves.stored_specs(template)
    stored = {name: _as_saved(spec, saved[name]) for name, spec in specs.items() if name in saved}
    arrays = read(stored)
    impls = {p: leaf["key_impl"] for p, leaf in saved.items() if "key_impl" in leaf}
    values = leaves.values(arrays, stored, impls)
    _verify(where, values, found)
    return leaves.fitted(template, values)


def _as_saved(spec: jax.ShapeDtypeStruct, saved: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    """Digests are of what was saved: a leaf that will be cast is read in its own dtype."""
    if "key_impl" in saved:
        return spec
    return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(saved["dtype"]), sharding=spec.sharding)


def read_manifest(path: epath.Path, template: Any, allowed: Allowed) -> dict[str, Any]:
    """The manifest of the step's folder `path`, if `template` fits it; raises as `read_state`."""
    try:
        found = _patiently(partial(manifest.read, path))
    except (FileNotFoundError, NotADirectoryError, manifest.NotOursError) as error:
        raise DataRefusedError(f"{path} is not a complete checkpoint") from error
    check_fits(f"checkpoint {path}", found, template, allowed)
    return found


def check_fits(where: str, found: Mapping[str, Any], template: Any, allowed: Allowed) -> None:
    """Raise DataRefusedError, naming each difference that nobody allowed."""
    if differing := allowed.refused(found, template):
        raise DataRefusedError(f"{where} does not fit this state: {some(differing)}")


def _read_arrays(
    handler: ocp.PyTreeCheckpointHandler,
    path: epath.Path,
    specs: Mapping[str, jax.ShapeDtypeStruct],
    saved: Mapping[str, Any],
) -> dict[str, jax.Array]:
    specs = {name: spec for name, spec in specs.items() if spec.size}
    args = {
        name: ocp.ArrayRestoreArgs(sharding=spec.sharding, global_shape=spec.shape)
        for name, spec in specs.items()
    }
    fewer = any(name not in specs and np.prod(leaf["shape"]) for name, leaf in saved.items())
    read = ocp.args.PyTreeRestore(
        item=dict.fromkeys(specs, 0) if fewer else None, restore_args=args, partial_restore=fewer
    )
    try:
        arrays = _patiently(lambda: handler.restore(path / listing.STATE_ITEM, args=read))
        arrays = {name: x for name, x in arrays.items() if name in specs} if fewer else arrays
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # the devices, not the data
    except Exception as error:
        line = one_line(error)
        if any(sign in line for sign in _DENIED):
            raise FailedError(f"checkpoint {path} cannot be read: {line}") from error
        passing = may_pass(line)
        raise DamagedError(f"checkpoint {path} cannot be read: {line}", not passing) from error
    if differing := manifest.differences(leaves.kinds(arrays), leaves.kinds(specs)):
        raise DamagedError(f"checkpoint {path} is corrupt: {some(list(differing.values()))}")
    return arrays


def _patiently(read: Any) -> Any:
    """What `read` returns; trouble that may pass is waited out, a little longer each time."""
    for trial in range(_TRIES):
        try:
            return read()
        except (MemoryError, jax.errors.JaxRuntimeError, FileNotFoundError, DataRefusedError):
            raise
        except Exception as error:
            line = one_line(error)
            if trial + 1 == _TRIES or not may_pass(line):
                raise
            pause = _FIRST_PAUSE_S * 2**trial
            log.warning("reading a checkpoint: %s; again in %g s", line, pause)
            time.sleep(pause)
    raise AssertionError("unreachable")


def _verify(where: str, state: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise DamagedError naming the leaves that are not what was saved; collective."""
    words = leaves.words(state)
    digests = leaf_digests(state, words)
    bad = [leaf for leaf, digest in digests.items() if digest != found["leaves"][leaf]["digest"]]
    if bad:
        raise DamagedError(f"{where} is corrupt: digests differ in {some(bad)}")
    whole = set(digests) == set(found["leaves"])
    if whole and state_digest(state, words) != found["state_digest"]:
        raise DamagedError(f"{where} is corrupt: its state digest differs")
