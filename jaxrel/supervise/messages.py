"""What leader and agents say to each other: one JSON object a line.

Besides the types here, the events and actions of `exchange` travel as they are, with ages for
times. Whoever connects first says `Hello` with the job's token, or is dropped.
"""

import hmac
import json
from dataclasses import asdict, dataclass
from typing import Any

from jaxrel.heartbeat import Beat
from jaxrel.supervise import exchange

LONGEST = 1 << 20
"""Bytes of a line."""


class ProtocolError(Exception):
    """What came is no message of this protocol."""


@dataclass(frozen=True)
class Hello:
    """An agent: who it is."""

    host: str
    token: str

    def knows(self, token: str) -> bool:
        """Whether it has the job's token, in constant time."""
        return hmac.compare_digest(self.token.encode(), token.encode())


@dataclass(frozen=True)
class Alive:
    """An agent: nothing new."""


@dataclass(frozen=True)
class Spawn:
    """To an agent: start these processes."""

    attempt: int
    ranks: list[int]
    processes: int
    """In the whole job."""
    coordinator: str
    run_dir: str
    command: list[str]
    cpu_devices: int | None = None
    lease_s: float = 60.0
    """End them when nothing was heard of the leader for so long: it will count them as gone."""


@dataclass(frozen=True)
class Leave:
    """To an agent: the job is over."""


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Hello, Alive, Spawn, Leave,
        exchange.Progress, exchange.Exited, exchange.Stopped, exchange.Continued,
        exchange.SpawnFailed, exchange.Dumped, exchange.Gone, exchange.TerminateAsked,
        exchange.Dump, exchange.Terminate, exchange.Kill,
    )
}  # fmt: skip


def encode(message: Any) -> bytes:
    """A message as a line."""
    return json.dumps({"is": type(message).__name__} | asdict(message)).encode() + b"\n"


def decode(line: bytes) -> Any:
    """The message in a line. Raises ProtocolError when it holds none."""
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop("is")]
        if "beat" in values:
            values["beat"] = Beat(**values["beat"])
        message = kind(**values)
        for name, kinds in (("attempt", int), ("rank", int), ("host", str), ("token", str)):
            if name in values and type(values[name]) is not kinds:
                raise TypeError(f"{name} is {values[name]!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error}") from None
    return message
