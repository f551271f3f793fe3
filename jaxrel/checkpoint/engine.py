"""How Orbax is set up: the layout of arrays on disk, and the commit."""

from collections.abc import Callable
from functools import cache
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.serialization import tensorstore_utils
from orbax.checkpoint.path import atomicity

from jaxrel.checkpoint import listing, manifest, object_store

CHUNK_BYTES = 64 << 20
"""Largest piece in which a leaf is stored: what a reader must hold to check it."""
_SLICE_BYTES = 4096
"""A replicated leaf is written in parts by all processes if the parts have this size."""


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """How arrays are laid out on disk.

    Replicas share the work only among processes: within one, cutting a leaf into parts buys
    nothing and compiles a slice for each. Weights hardly compress, and trying costs more
    than writing them. Shardings and array metadata stand in the manifest or are not needed.
    """
    arrays = type_handlers.ArrayHandler(
        use_replica_parallel=jax.process_count() > 1,
        min_slice_bytes_for_replica_parallel=_SLICE_BYTES,
        enable_write_sharding_file=False,
        array_metadata_store=None,
    )
    registry = type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)


@cache
def add_s3() -> None:
    """Teach Orbax where arrays on S3 are: it knows only files and Google's store.

    It has no hook for this; all its specs come from the one function that is wrapped here.
    """
    files = tensorstore_utils.build_kvstore_tspec

    def spec(directory: str, *args: Any, **options: Any) -> dict[str, Any]:
        if not object_store.remote(directory):
            return files(directory, *args, **options)
        found = files(directory.removeprefix("s3:/"), *args, **options)
        found.pop("manifest", None)  # apart from the rest only because files are not atomic
        return {**found, "base": object_store.kvstore(f"s3:/{found['base']['path']}")}

    tensorstore_utils.build_kvstore_tspec = spec


def writer(
    arrays: ocp.PyTreeCheckpointHandler,
    timeout_s: int,
    temporary_name: Callable[[str], str],
    renames: bool,
) -> ocp.AsyncCheckpointer:
    """`renames`: whether the storage has an atomic rename; else a file written last commits."""

    class Temporary(atomicity.AtomicRenameTemporaryPath):
        @classmethod
        def from_final(cls, final_path: epath.Path, **options: Any) -> Self:
            temporary = final_path.with_name(temporary_name(final_path.name))
            return cls(temporary, final_path, **options)

    # Folders are made before the save returns: made in the background, one that cannot be
    # made leaves threads waiting for it.
    options = ocp.options.AsyncOptions(
        timeout_secs=timeout_s, create_directories_asynchronously=False
    )
    items = {listing.STATE_ITEM: arrays, manifest.ITEM: ocp.JsonCheckpointHandler(manifest.FILE)}
    in_place = None if renames else atomicity.CommitFileTemporaryPath
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(
            async_options=options, temporary_path_class=in_place
        ),
        **items,
    )
    return ocp.AsyncCheckpointer(
        handler, async_options=options, temporary_path_class=in_place or Temporary
    )
