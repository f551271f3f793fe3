"""Compiled programs on disk, so that a restarted process compiles nothing."""

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler, distributed
from jax.experimental.compilation_cache import compilation_cache


def use_compile_cache(directory: str | Path) -> None:
    """Keep every program that is compiled from now on below `directory`.

    JAX_COMPILATION_CACHE_DIR in the environment wins. Programs of another kind of CPU are kept
    apart: they may use instructions that this one lacks.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path(directory, _machine())))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX decides at its first compilation whether there is one
    _let_every_process_write()


def _let_every_process_write() -> None:
    """On CPU, the cache's keys differ by process, but JAX lets process 0 alone write.

    The other processes would compile anew at every start. (There is no public setting.)
    """
    write: Any = compiler._cache_write
    if getattr(write, "by_every_process", False):
        return

    def as_process_0(*args: Any, **kwargs: Any) -> None:
        state = distributed.global_state
        process, state.process_id = state.process_id, 0
        try:
            write(*args, **kwargs)
        finally:
            state.process_id = process

    as_process_0.by_every_process = True  # type: ignore[attr-defined]
    compiler._cache_write = as_process_0


def _machine() -> str:
    """A name for this kind of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    kind = f"{platform.machine()} {flags} {jax.__version__}"
    return hashlib.blake2b(kind.encode(), digest_size=8).hexdigest()
