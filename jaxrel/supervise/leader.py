"""The leader of a job: hears the agents, asks the core, does what it says.

One process with one thread and no decisions of its own: it owns the sockets, the clock and
the ledger, and hands everything that happens to `core.step`.
"""

import asyncio
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from jaxrel.events import AttemptStarted, Event, HostAway, HostBack, JobEnded, JobStarted
from jaxrel.supervise import exchange as x
from jaxrel.supervise.core import Stage, begin, step, wake
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
from jaxrel.supervise.narrator import Narrator
from jaxrel.supervise.policy import Policy
from jaxrel.supervise.verdict import Budget

_HELLO_S = 5.0
_LATE_S = 1.0
"""A timer that is later than this was held up with the whole process."""
_CATCH_UP_S = 0.5
"""For what arrived in the meantime to be read before time is called."""


class LedgerLike(Protocol):
    """What the leader needs of `Provisional`."""

    attempt: int

    def write(self, event: Event) -> None:
        """Append an event."""
        ...

    def heard(self, phase: str) -> None:
        """A worker says that it is at `phase`."""
        ...

    def begin_attempt(self, attempt: int) -> None:
        """What follows belongs to another attempt."""
        ...

    def sync(self) -> None:
        """Wait until it is on the disk."""
        ...


class Hosts(Protocol):
    """Where agents come from."""

    def start(self, leader: str, token: str, gone: Callable[[str], None]) -> None:
        """Start them all; called once, in the running loop.

        `gone` may be told of a host whose agent has died and on which nothing is left of what
        it ran. Where nobody can tell, the agent's lease has to end.
        """
        ...

    def kill(self, host: str) -> None:
        """An agent does not answer: end it; another one may come."""
        ...

    async def stop(self) -> None:
        """Wait until all have left."""
        ...


@dataclass(frozen=True)
class Job:
    """What is run."""

    command: tuple[str, ...]
    run_dir: Path
    cpu_devices: int | None = None
    bind: str = "127.0.0.1"


@dataclass
class _Link:
    """The connection to an agent."""

    writer: asyncio.StreamWriter
    heard: float


class Leader:
    """Runs one job to its end."""

    def __init__(
        self,
        job: Job,
        policy: Policy,
        budget: Budget,
        *,
        hosts: Hosts,
        ledger: LedgerLike,
        pick_port: Callable[[], int],
        narrator: Narrator,
    ) -> None:
        """`ledger` is open for the attempt that comes first."""
        self._job, self._policy, self._budget = job, policy, budget
        self._hosts, self._ledger, self._pick_port = hosts, ledger, pick_port
        self._narrator = narrator
        self._token = secrets.token_hex(16)
        self._links: dict[str, _Link] = {}
        self._away: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """The exit code of the job. Nothing of it is left when this returns."""
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[x.End] = loop.create_future()
        self._state = begin(self._policy, self._budget, self._ledger.attempt - 1, loop.time())
        command, hosts = list(self._job.command), list(self._policy.hosts)
        self._record(JobStarted(command, hosts, self._policy.processes, self._policy.spares))
        self._narrator.begins(self._policy)
        server = await asyncio.start_server(self._serve, self._job.bind, 0, limit=LONGEST)
        address, port = server.sockets[0].getsockname()[:2]
        listening = asyncio.create_task(self._listen_for_silence())
        try:
            with _signals(self._feed):
                self._hosts.start(f"{address}:{port}", self._token, self._gone)
                self._feed(x.Tick())
                end = await self._ended
        finally:
            listening.cancel()
            if self._timer is not None:
                self._timer.cancel()
            self._ended.cancel()  # an agent that comes now is told to leave
            for host in self._links:
                self._send(host, Leave())
            await self._hosts.stop()
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
        self._record(JobEnded(int(end.code), end.reason))
        self._narrator.ended(end)
        return int(end.code)

    # What happens

    def _feed(self, event: x.Happening) -> None:
        """Tell the core, and do what it says."""
        if self._ended.done():
            return
        loop, before = asyncio.get_running_loop(), self._state.stage
        try:
            self._state, actions = step(self._state, event, loop.time())
            for action in actions:
                self._do(action)
            if self._state.stage is Stage.WAITING is not before:
                self._narrator.waits(self._state)
        except Exception as error:  # whoever fed it is a callback, and nobody would hear of it
            self._ended.set_exception(error)
            return
        if self._timer is not None:
            self._timer.cancel()
        wakes = wake(self._state)
        self._timer = None if wakes is None else loop.call_at(wakes, self._tick, wakes)

    def _tick(self, due: float) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - due > _LATE_S:  # hear first what arrived while this process was held up
            self._timer = loop.call_later(_CATCH_UP_S, self._feed, x.Tick())
        else:
            self._feed(x.Tick())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: an agent, or a stranger."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            host = await self._admit(reader)
            if host is not None:
                await self._hear(host, reader, writer)
        finally:
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader) -> str | None:
        """The host that an agent speaks for; None when it is not one of this job."""
        try:
            hello = decode(await asyncio.wait_for(reader.readline(), _HELLO_S))
        except (ProtocolError, OSError, ValueError, TimeoutError):
            return None
        if not isinstance(hello, Hello) or not hello.knows(self._token):
            return None
        known = hello.host in self._policy.hosts and hello.host not in self._links
        return hello.host if known else None

    async def _hear(
        self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Everything an agent says, until it is gone."""
        loop = asyncio.get_running_loop()
        link = self._links[host] = _Link(writer, loop.time())
        self._send(host, Leave() if self._ended.done() else Alive())
        if host in self._away:
            self._away.discard(host)
            self._tell(HostBack(host))
        self._feed(x.HostUp(host))
        why = "its agent closed the connection"
        try:
            while line := await reader.readline():
                link.heard = loop.time()
                message = decode(line)
                if hasattr(message, "at"):  # an age, on the wire
                    message = replace(message, at=loop.time() - message.at)
                if isinstance(message, x.Progress):
                    self._ledger.heard(message.beat.phase)
                if not isinstance(message, Alive):
                    self._feed(message)
        except (ProtocolError, OSError, ValueError) as error:
            why = str(error)
        finally:
            del self._links[host]
            self._away.add(host)
            self._tell(HostAway(host, why))
            self._feed(x.HostLost(host, why))

    def _gone(self, host: str) -> None:
        """An agent has died, and nothing is left of what it ran."""
        if link := self._links.get(host):
            link.writer.transport.abort()
        self._feed(x.HostLost(host, "its agent died"))
        self._feed(x.Gone(self._state.attempt, host))

    async def _listen_for_silence(self) -> None:
        """An agent that says nothing is as good as gone; each of them hears that we live."""
        loop = asyncio.get_running_loop()
        limit_s = self._policy.deadlines.agent_s
        looked = loop.time()
        while True:
            await asyncio.sleep(limit_s / 4)
            for host in self._links:
                self._send(host, Alive())
            now, before, looked = loop.time(), looked, loop.time()
            if now - before > limit_s / 2:  # this process was held up, and they may have spoken
                continue
            for host, link in list(self._links.items()):
                if now - link.heard > limit_s:
                    self._hosts.kill(host)
                    link.writer.transport.abort()

    # What is to be done

    def _do(self, action: x.Action) -> None:
        match action:
            case x.StartAttempt():
                self._start(action)
            case x.Record(event):
                self._tell(event)
            case x.Kill(_, host):
                self._send(host, action)
            case x.Dump() | x.Terminate():
                for host in self._links:
                    self._send(host, action)
            case x.End():
                self._ended.set_result(action)

    def _start(self, action: x.StartAttempt) -> None:
        """Have all processes spawned."""
        meeting = self._links[action.hosts[0]].writer.get_extra_info("peername")[0]
        name = f"[{meeting}]" if ":" in meeting else meeting
        coordinator = f"{name}:{self._pick_port()}"
        if self._ledger.attempt != action.attempt:
            self._ledger.begin_attempt(action.attempt)
        self._record(AttemptStarted(list(action.hosts), coordinator))
        self._narrator.starts(action, coordinator)
        for host in dict.fromkeys(action.hosts):
            order = Spawn(
                action.attempt,
                [rank for rank, its in enumerate(action.hosts) if its == host],
                len(action.hosts),
                coordinator,
                str(self._job.run_dir),
                list(self._job.command),
                self._job.cpu_devices,
                self._policy.lease_s,
            )
            self._send(host, order)

    def _send(self, host: str, message: Any) -> None:
        link = self._links.get(host)
        if link is not None and not link.writer.is_closing():
            link.writer.write(encode(message))

    def _tell(self, event: Event) -> None:
        if not self._ended.done():
            self._record(event)
            self._narrator.tells(event, self._state)

    def _record(self, event: Event) -> None:
        self._ledger.write(event)
        self._ledger.sync()


class _signals:
    """While the block runs, signals ask the job to stop."""

    def __init__(self, feed: Callable[[x.Happening], None]) -> None:
        self._feed = feed
        self._taken: list[signal.Signals] = []

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            ignored = signal.getsignal(number) is signal.SIG_IGN  # nohup, or a shell's `&`
            if not ignored or number == signal.SIGTERM:
                loop.add_signal_handler(number, self._ask, number)
                self._taken.append(number)

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self._taken:
            loop.remove_signal_handler(number)

    def _ask(self, number: signal.Signals) -> None:
        self._feed(x.TerminateAsked(number.name))
