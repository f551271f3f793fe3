"""Hosts that are simulated by name on this machine: an agent process each."""

import asyncio
import os
import signal
import sys
from contextlib import suppress

from jaxrel.supervise.workers import ENVIRONMENT

_LEAVE_S = 15.0
_AGAIN_S = 0.2


class LocalHosts:
    """Starts an agent for each host, and another when one is lost."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        """Nothing is started yet."""
        self._hosts = hosts
        self._agents: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self, leader: str, token: str) -> None:
        """Start the agents, which connect to `leader`."""
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
        self._stopping = True
        _, late = await asyncio.wait(self._tasks, timeout=_LEAVE_S)
        if late:
            for host in self._hosts:
                self.kill(host)
            await asyncio.wait(late)

    async def _keep(self, host: str, leader: str, environment: dict[str, str]) -> None:
        command = (sys.executable, "-m", "jaxrel.cli", "agent", "--leader", leader, "--host", host)
        while not self._stopping:
            self._agents[host] = agent = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # what a terminal's keys send is for the leader alone
            )
            await agent.wait()
            if not self._stopping:
                await asyncio.sleep(_AGAIN_S)
