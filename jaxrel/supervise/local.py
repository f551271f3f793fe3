"""Hosts that are simulated by name on this machine: an agent process each."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from jaxrel.supervise import proc
from jaxrel.supervise.workers import ENVIRONMENT

_LEAVE_S = 15.0
_LOOK_S = 0.02


class LocalHosts:
    """Starts an agent for each host. A host whose agent dies is off for a while, then back."""

    def __init__(self, hosts: tuple[str, ...], return_s: float) -> None:
        """Nothing is started yet; `return_s` is how long a host is off."""
        self._hosts, self._return_s = hosts, return_s
        self._agents: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    def start(self, leader: str, token: str, gone: Callable[[str], None]) -> None:
        """Start the agents, which connect to `leader`; `gone` hears of hosts that are off."""
        self._token, self._gone = token, gone
        inherited = {name: v for name, v in os.environ.items() if name not in ENVIRONMENT}
        environment = inherited | {"JAXREL_TOKEN": token}
        for host in self._hosts:
            self._tasks.append(asyncio.create_task(self._keep(host, leader, environment)))

    def kill(self, host: str) -> None:
        """End an agent that does not answer, and with it its processes; another is started."""
        agent = self._agents.get(host)
        if agent is not None and agent.returncode is None:
            with suppress(ProcessLookupError):
                agent.send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        """Wait for the agents, which were told to leave; kill those that do not."""
        self._stopping.set()
        _, late = await asyncio.wait(self._tasks, timeout=_LEAVE_S)
        if late:
            for host in self._hosts:
                self.kill(host)
            await asyncio.wait(late)

    async def _keep(self, host: str, leader: str, environment: dict[str, str]) -> None:
        command = (sys.executable, "-m", "jaxrel.cli", "agent", "--leader", leader, "--host", host)
        while not self._stopping.is_set():
            self._agents[host] = agent = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # what a terminal's keys send is for the leader alone
            )
            await agent.wait()
            if self._stopping.is_set():
                return
            await self._clear(host)
            self._gone(host)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._return_s)

    async def _clear(self, host: str) -> None:
        """Nothing runs on a host that is off."""
        marks = (f"JAXREL_TOKEN={self._token}", f"JAXREL_HOST={host}")
        clean = 0
        while clean < 2:  # what is started during one look may be missed by it
            left = proc.members((), marks)
            proc.kill(left)
            clean = 0 if left else clean + 1
            await asyncio.sleep(_LOOK_S)
