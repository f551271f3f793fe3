"""What the manifest says about a state that is about to be saved."""

from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

import jax

from jaxrel.checkpoint import leaves, manifest
from jaxrel.digest import leaf_digests, state_digest
from jaxrel.exit_codes import UsageError

_PACKAGES = ("jaxrel", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def describe(
    step: int,
    state: Any,
    extra: Mapping[str, Any] | None,
    words: Any = None,
    metric: float | None = None,
) -> dict[str, Any]:
    """The manifest of `state`; collective where the digests (`words`) are not given.

    Raises UsageError if `extra` is not JSON.
    """
    described = leaves.kinds(state)
    words = leaves.words(state) if words is None else words
    for path, digest in leaf_digests(state, words).items():
        described[path]["digest"] = digest
    for path, leaf in leaves.by_path(state).items():
        if leaves.is_key(leaf):
            described[path]["key_impl"] = str(jax.random.key_impl(leaf))
    content = {
        "format": manifest.FORMAT,
        "step": int(step),
        "state_digest": state_digest(state, words),
        "leaves": described,
        "nodes": leaves.nodes(state),
        "metric": None if metric is None else float(metric),
        "mesh": dict(leaves.mesh_of(jax.tree.leaves(state)).shape),
        "processes": jax.process_count(),
        "versions": _versions(),
        "extra": dict(extra or {}),
    }
    try:
        return manifest.seal(content)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the extra of step {step} is not JSON: {error}") from error


@cache
def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
