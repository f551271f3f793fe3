"""The part of a job's supervisor that runs on each host; it has one thread.

It does what the leader asks and tells what it sees. When the leader is gone, or was silent for
the lease that came with the processes, it kills them and leaves: nobody is there to restart
them, or a leader that cannot be heard is about to start others in their place.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from jaxrel.exit_codes import ExitCode, FailedError, UsageError
from jaxrel.supervise.console import Console
from jaxrel.supervise.exchange import Dump, Gone, Kill, Terminate, TerminateAsked
from jaxrel.supervise.messages import (
    LONGEST,
    Alive,
    Hello,
    Leave,
    ProtocolError,
    Spawn,
    decode,
    encode,
)
from jaxrel.supervise.policy import LAST_S
from jaxrel.supervise.workers import Crew, adopt_orphans, log_path

_POLL_S = 0.1
_ALIVE_S = 1.0
_CONNECT_S = 60.0
_PROOF_S = 0.02


def agent(leader: str, host: str) -> int:
    """Serve the leader at `leader`, `host:port`, as `host`, until it says so or is gone.

    Raises UsageError and FailedError.
    """
    token = os.environ.get("JAXREL_TOKEN", "")
    if not token:
        raise UsageError("JAXREL_TOKEN: got nothing: expected the token of the job")
    connection = _connect(leader)
    adopt_orphans()
    return asyncio.run(_Agent(host, token, leader).serve(connection))


def _connect(leader: str) -> socket.socket:
    """A connection to the leader, which may still be starting."""
    name, _, port = leader.rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"leader: got {leader!r}: expected HOST:PORT")
    ends = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((name.strip("[]"), int(port)), timeout=5.0)
        except OSError as error:
            if time.monotonic() > ends:
                raise FailedError(
                    f"leader: got {leader!r}: cannot be reached in {_CONNECT_S:g} s: {error}"
                ) from None
            time.sleep(0.2)


class _Agent:
    """One host's connection to its leader."""

    def __init__(self, host: str, token: str, leader: str) -> None:
        self._host, self._token, self._leader = host, token, leader
        self._crew = Crew(0, host, token)
        self._killing: asyncio.Task[None] | None = None
        self._follow: int | None = None  # the log of rank 0
        self._lease_s: float | None = None
        self._console = Console()
        self._writer: asyncio.StreamWriter

    async def serve(self, connection: socket.socket) -> int:
        """Until the leader leaves or is lost."""
        connection.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=connection, limit=LONGEST)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked, number)
        self._send(Hello(self._host, self._token))
        watching = asyncio.create_task(self._watch())
        try:
            return await self._obey(reader)
        finally:
            watching.cancel()
            await self._last()

    async def _obey(self, reader: asyncio.StreamReader) -> int:
        """Do what the leader says, line by line."""
        welcome = False
        with suppress(OSError, ValueError):  # it is gone or silent, or says more than a line holds
            while line := await asyncio.wait_for(reader.readline(), self._lease_s):
                message = decode(line)
                welcome = True
                if isinstance(message, Leave):
                    return ExitCode.OK
                self._do(message)
        if welcome:
            raise FailedError(f"agent {self._host}: the leader at {self._leader} is gone or silent")
        raise FailedError(
            f"agent {self._host}: the leader at {self._leader} refused it: expected a host of the"
            " job that is not there yet, and the job's token in JAXREL_TOKEN"
        )

    def _do(self, message: Any) -> None:
        match message:
            case Spawn(attempt) if attempt > self._crew.attempt:
                self._crew.close()
                self._crew = Crew(attempt, self._host, self._token)
                self._lease_s = message.lease_s
                self._tell(self._crew.spawn(message))
                self._open_log(message)
            case Dump(attempt, ranks) if attempt == self._crew.attempt:
                self._crew.dump(ranks)
            case Terminate(attempt) if attempt == self._crew.attempt:
                self._crew.terminate()
            case Kill(attempt) if self._killing is None or self._killing.done():
                if attempt != self._crew.attempt:  # of an agent before this one
                    self._crew = Crew(attempt, self._host, self._token)
                self._killing = asyncio.create_task(self._kill())
            case Alive() | Kill() | Dump() | Terminate():
                pass
            case _:
                raise ProtocolError(f"not for an agent: {message}")

    async def _kill(self) -> None:
        while not self._crew.kill():
            await asyncio.sleep(_PROOF_S)
            self._reap()
        self._send(Gone(self._crew.attempt, self._host))

    async def _watch(self) -> None:
        """Look at everything now and then; say that this agent lives."""
        spoken = 0.0
        while True:
            self._reap()  # a signal can be missed
            self._tell(self._crew.look())
            self._show_log()
            if time.monotonic() - spoken > _ALIVE_S:
                self._send(Alive())
                spoken = time.monotonic()
            await asyncio.sleep(_POLL_S)

    def _reap(self) -> None:
        self._tell(self._crew.reap())

    def _asked(self, number: signal.Signals) -> None:
        self._send(TerminateAsked(f"{number.name} to the agent of {self._host}"))

    def _tell(self, messages: Iterable[Any]) -> None:
        for message in messages:
            self._send(message)

    def _send(self, message: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    def _open_log(self, order: Spawn) -> None:
        if self._follow is not None:
            self._show_log()
            os.close(self._follow)
            self._follow = None
        if 0 in order.ranks:
            with suppress(OSError):
                path = log_path(order.run_dir, order.attempt, 0)
                self._follow = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _show_log(self) -> None:
        """What rank 0 has written since; as much as can be taken at once."""
        if self._follow is not None:
            with suppress(OSError):
                self._console.write(os.read(self._follow, 1 << 16))

    async def _last(self) -> None:
        """Nothing outlives this process."""
        ends = time.monotonic() + LAST_S
        while not self._crew.kill() and time.monotonic() < ends:
            await asyncio.sleep(_PROOF_S)
            self._tell(self._crew.reap())
        self._show_log()
        self._console.close()
        self._writer.close()
