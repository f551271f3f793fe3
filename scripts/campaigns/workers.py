"""Real `jaxrel train` processes: started, watched line by line, killed."""

import contextlib
import os
import queue
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

SMALL: dict[str, Any] = {
    "run.steps": 16,
    "run.print_every": 1,
    "batch.global_size": 8,
    "batch.sequence": 32,
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.mlp": 64,
    "checkpoint.interval": 4,
    "checkpoint.keep": 100,
}
"""A run of a few seconds that keeps every checkpoint: overrides of the tiny configuration."""


class Worker:
    """One process of `jaxrel train`, and the lines that it prints."""

    def __init__(
        self,
        run: Path,
        flags: Mapping[str, Any],
        *,
        cache: Path,
        environment: Mapping[str, str] = {},
    ) -> None:
        """Start it on run directory `run`; `cache` is shared by workers to compile once."""
        self.process = subprocess.Popen(
            self.command(run, flags),
            cwd=ROOT,
            env={**self.environment(cache), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @staticmethod
    def command(run: Path, flags: Mapping[str, Any]) -> list[str]:
        """The command line."""
        command = [sys.executable, "-m", "jaxrel.cli", "train", "scripts/configs/tiny.yaml"]
        for key, value in {**SMALL, "run.dir": run, **flags}.items():
            command += [f"--{key}", str(value)]
        return command

    @staticmethod
    def environment(cache: Path) -> dict[str, str]:
        """This process's environment without a launcher's variables, and with the cache."""
        mine = {name: value for name, value in os.environ.items() if name[:7] != "JAXREL_"}
        return mine | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def wait_for(self, pattern: str, timeout_s: float = 120.0) -> str:
        """The next line in which `pattern` is found. Raises AssertionError if none comes."""
        ends = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {pattern!r} in {timeout_s} s: {self.lines}") from None
            assert line, f"ended without {pattern!r}: {self.lines}"
            if re.search(pattern, line):
                return line

    def finish(self, timeout_s: float = 120.0) -> int:
        """Its exit code; `lines` is complete then. A process that does not end is killed."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end in {timeout_s} s: {self.lines}") from None
        self._reader.join()
        return code

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                self.lines.append(line.rstrip("\n"))
                self._queue.put(line)
        self._queue.put("")


def free_port() -> int:
    """A port for a coordinator, below those that the kernel gives to whoever connects."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def final_digest(lines: list[str]) -> str:
    """The state digest that a finished worker reports."""
    found = re.search(r"finished: step \d+, state digest ([0-9a-f]{32})$", lines[-1])
    assert found, lines
    return found[1]
