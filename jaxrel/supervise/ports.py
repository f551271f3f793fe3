"""Ports on which processes of an attempt meet."""

import random
import socket
from collections.abc import Callable
from pathlib import Path

_LOWEST = 20_000


def fresh_ports() -> Callable[[], int]:
    """A function that gives free ports, each once, below those the kernel lends to clients.

    A port that a client might be lent can be taken between the choice and its use.
    """
    used: set[int] = set()

    def pick() -> int:
        for _ in range(1000):
            port = random.randrange(_LOWEST, _first_lent())
            if port not in used and _is_free(port):
                used.add(port)
                return port
        raise OSError("no free port below those that the kernel lends to clients")

    return pick


def _first_lent() -> int:
    try:
        lent = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        lent = 32_768
    return lent if lent > _LOWEST + 100 else 65_536


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False
