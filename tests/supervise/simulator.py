"""A job in virtual time: the real core, and hosts and processes that are only imagined.

One seed makes one life of a job, with faults of every kind and messages that come late, twice
or not at all; the same seed makes the same life again. After every event the core's own
invariants are checked, and those that only the world can know: never a process of an older
attempt beside a new one, never a process left at the end.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxrel.events import (
    AttemptEnded,
    FailureDetected,
    GangDead,
    HostDrained,
)
from jaxrel.heartbeat import Beat
from jaxrel.supervise import exchange as x
from jaxrel.supervise.core import LIVE, State, begin, step, wake
from jaxrel.supervise.deadlines import Deadlines
from jaxrel.supervise.invariants import violations
from jaxrel.supervise.policy import LAST_S, Policy
from jaxrel.supervise.verdict import Budget

FAULTS = {
    "kill": 4, "stop": 3, "stop a while": 2, "hang": 4, "exception": 3, "exit": 2, "early 0": 2,
    "preempt all": 2, "agent dies": 3, "host vanishes": 3, "cut off": 1, "unspawnable": 1,
    "64": 0.2, "76": 1.5, "77": 0.2, "long save": 3, "slow step": 3,
}  # fmt: skip


@dataclass
class Process:
    """An imagined process of an attempt."""

    attempt: int
    rank: int
    host: str
    alive: bool = True
    stopped: bool = False
    hung: bool = False
    sequence: int = 0
    obeys: bool = True


@dataclass
class World:
    """One life of a job."""

    seed: int
    steps: int = 0
    now: float = 0.0
    faults_per_attempt: float = 0.8
    log: list[str] = field(default_factory=list)
    """What happened, for whoever replays the seed."""
    ended: x.End | None = None
    starts: int = 0
    growths: int = 0
    """Attempts that were ended for one on more hosts."""
    records: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = r = random.Random(self.seed)
        self.silent, self.looks = r.random() < 0.1, r.random() < 0.5
        self.steps = r.choice((12, 12, 12, 60, 200))
        wanted, spares = r.choice((1, 2, 2, 3, 4)), r.choice((0, 0, 1, 2))
        hosts = tuple(f"host{n}" for n in range(wanted + spares))
        policy = Policy(
            hosts, r.choice((1, 1, 2)), Deadlines(r.choice((2.0, 60.0))), r.choice((5.0, 60.0)),
            jitter=r.random(), spares=spares, shrink_after_s=r.choice((0.0, 5.0, 90.0)),
            grow_after_s=r.choice((None, None, 3.0)), lease_s=r.choice((20.0, 60.0)),
            drain_after=r.choice((1, 3)), counts=r.choice(((), (), (wanted,))),
        )  # fmt: skip
        self.code_fault = r.randrange(2, self.steps) if r.random() < 0.05 else None
        """The step that no attempt completes."""
        self.bad: set[str] = set()
        """Hosts that a worker gave up, and the core was told."""
        budget = Budget(r.choice((0, 2, 10, 30)), r.choice((1, 3, 8)))
        self.state: State = begin(policy, budget, 0, self.now)
        self.up: dict[str, int] = {}
        """Agents that live, and the incarnation of each."""
        self.processes: list[Process] = []
        self.saved = self.done = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        for host in hosts:
            self.after(r.uniform(0.1, 3), self.agent_starts, host)
        for _ in range(r.choice((0, 0, 1, 3))):
            at, host, returns = r.uniform(0, 120), r.choice(hosts), r.random() < 0.8
            self.after(at, self.agent_dies, host, returns)
        if r.random() < 0.15:
            for _ in range(r.choice((1, 1, 2, 3))):
                self.after(r.uniform(0, 60), self.tell, x.TerminateAsked("somebody"))

    # Time

    def after(self, delay: float, do: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay, self._order, lambda: do(*arguments)))

    def live(self) -> State:
        """Until the job has ended."""
        for _ in range(20_000):
            if self.ended is not None:
                break
            wakes = wake(self.state)
            due = None if wakes is None else wakes + self.random.choice((0.0, 0.0, 0.01, 3.0))
            if not self._queue or (due is not None and due < self._queue[0][0]):
                assert due is not None, self.fail("nothing will ever happen again")
                self.now = max(self.now, due)
                self.tell(x.Tick())
            else:
                at, _, do = heapq.heappop(self._queue)
                self.now = max(self.now, at)
                do()
        assert self.ended is not None, self.fail("does not end")
        if "may still run" not in self.ended.reason:
            left = [p for p in self.processes if p.alive]
            assert not left, self.fail(f"left at the end: {left}")
        return self.state

    def fail(self, what: str) -> str:
        return f"seed {self.seed}, {self.now:.2f} s, {self.state.stage}: {what}\n" + "\n".join(
            self.log[-40:]
        )

    # The core

    def tell(self, event: x.Happening) -> None:
        if self.ended is not None:
            return
        self.log.append(f"{self.now:9.3f} {event}")
        match event:
            case x.Exited(attempt, rank, 76) if attempt == self.state.attempt:
                if self.state.stage in LIVE and self.state.ranks[rank].alive:
                    self.bad.add(self.state.ranks[rank].host)
            case _:
                pass
        self.state, actions = step(self.state, event, self.now)
        for action in actions:
            self.log.append(f"{self.now:9.3f}     -> {action}")
            self.do(action)
        found = violations(self.state, self.now, actions)
        assert not found, self.fail("; ".join(found))

    def message(self, host: str, event: x.Happening, reliable: bool = True) -> None:
        """From an agent: in order of sending unless it is repeated, never after its loss."""
        incarnation = self.up.get(host)
        if incarnation is None or (not reliable and self.random.random() < 0.05):
            return

        def arrives() -> None:
            if self.up.get(host) == incarnation:
                self.tell(event)

        self.after(0.01, arrives)
        if self.random.random() < 0.03:
            self.after(self.random.uniform(0.01, 5), arrives)

    def do(self, action: x.Action) -> None:
        delay = self.random.uniform(0.001, 0.05)
        match action:
            case x.StartAttempt(attempt, hosts):
                living = [p for p in self.processes if p.alive]
                assert not living, self.fail(f"a new attempt beside {living}")
                assert not self.bad & set(hosts), self.fail(f"uses one of {self.bad}")
                assert attempt == self.starts + 1, self.fail("attempts are not counted")
                self.starts = attempt
                self.processes = []
                self.after(delay, self.spawn, attempt, hosts)
            case x.Kill(attempt, host):
                self.after(delay, self.kill, attempt, host)
            case x.Dump(attempt, ranks):
                for process in self.processes:
                    if process.rank in ranks and self.random.random() < 0.8:
                        late = self.random.choice((0.01, 0.5, 2.5))
                        dumped = x.Dumped(attempt, process.rank)
                        self.after(late, self.message, process.host, dumped)
            case x.Terminate():
                self.growths += not self.state.asked
                for process in self.processes:
                    if process.alive and process.obeys:
                        late = self.random.uniform(0, 4)
                        self.after(late, self.exit, process, 75, "stop")
            case x.Record(event):
                self.check_order(event)
                self.records.append(event)
            case x.End():
                self.ended = action

    def check_order(self, event: Any) -> None:
        """A failure is followed by the proof of death and the end of the attempt."""
        if isinstance(event, HostDrained):
            return
        follows = {
            FailureDetected: (AttemptEnded,),
            GangDead: (FailureDetected, AttemptEnded),
            AttemptEnded: (GangDead,),
        }
        kinds = (type(record) for record in reversed(self.records))
        last = next((kind for kind in kinds if kind in follows), AttemptEnded)
        assert last in follows[type(event)], self.fail(f"{event} after {last}")

    # Hosts and processes

    def agent_starts(self, host: str) -> None:
        self.up[host] = self.up.get(host, 0) + 1_000 + self._order
        self.tell(x.HostUp(host))

    def agent_dies(self, host: str, returns: bool, cut_off: bool = False) -> None:
        """With it its processes; the leader hears of it a little later.

        When only the way to it is `cut off`, its processes live on for as long as they may.
        """
        if self.up.pop(host, None) is None:
            return
        noticed = self.random.choice((0.0, 0.1, 5.0))
        lives_s = (
            self.random.uniform(0, noticed + self.state.policy.lease_s + LAST_S) if cut_off else 0.0
        )
        for process in self.processes:
            if process.host == host:
                self.after(lives_s, setattr, process, "alive", False)
                process.alive = process.alive and cut_off
        self.after(noticed, self.tell, x.HostLost(host, "gone"))
        if self.looks and not cut_off:  # the backend sees for itself that nothing is left
            self.after(noticed, self.tell, x.Gone(self.starts, host))
        if returns:
            later = lives_s + noticed + self.random.choice((0.5, 5.0, 30.0, 90.0))
            self.after(later, self.agent_starts, host)

    def spawn(self, attempt: int, hosts: tuple[str, ...]) -> None:
        self.done = self.saved
        fault = self.random.random() < self.faults_per_attempt
        kinds, weights = list(FAULTS), list(FAULTS.values())
        kind = self.random.choices(kinds, weights)[0] if fault else ""
        for rank, host in enumerate(hosts):
            if host not in self.up:
                continue
            if kind == "unspawnable" and rank == 0:
                self.message(host, x.SpawnFailed(attempt, rank, "no such file"))
                continue
            process = Process(attempt, rank, host, obeys=self.random.random() < 0.8)
            self.processes.append(process)
            self.say(process, "start")
        whole = len(self.processes) == len(hosts)
        if kind and kind != "unspawnable":
            self.after(self.random.uniform(0, 20), self.fault, attempt, kind)
        if whole:
            self.after(self.random.uniform(0.5, 5), self.compile, attempt)

    def of(self, attempt: int) -> list[Process]:
        return self.processes if self.starts == attempt else []

    def compile(self, attempt: int) -> None:
        for process in self.of(attempt):
            self.say(process, "compile")
        self.after(self.random.uniform(1, 10), self.steps_on, attempt)

    def steps_on(self, attempt: int) -> None:
        """All processes complete a step together, or none does."""
        processes = self.of(attempt)
        if not processes:
            return
        blocked = any(not p.alive or p.stopped or p.hung for p in processes)
        if blocked:
            for process in processes:  # whoever misses another one may abort
                if process.alive and not process.stopped and self.random.random() < 0.02:
                    self.exit(process, -6, "wait")
            self.after(0.5, self.steps_on, attempt)
            return
        if self.done + 1 == self.code_fault:
            victim = self.random.choice(processes)
            self.say(victim, "failed", f"KeyError: 'the code' at 0x{victim.sequence:x}")
            self.after(0.1, self.exit, victim, 1, "")
            return
        self.done += 1
        if self.done % 3 == 0:
            self.saved = self.done
        finished = self.done >= self.steps
        for process in processes:
            self.say(process, "done" if finished else "data")
            if finished:
                self.after(self.random.uniform(0, 2), self.exit, process, 0, "done")
        if not finished:
            self.after(self.random.uniform(0.2, 0.8), self.steps_on, attempt)

    def fault(self, attempt: int, kind: str) -> None:
        living = [p for p in self.of(attempt) if p.alive]
        if not living:
            return
        victim = self.random.choice(living)
        codes = {"kill": -9, "exit": 3, "early 0": 0, "64": 64, "76": 76, "77": 77}
        if kind in codes:
            self.exit(victim, codes[kind], "wait")
        elif kind == "exception":
            self.say(victim, "failed", "KeyError: 7")
            self.after(self.random.choice((0.1, 30.0)), self.exit, victim, 1, "failed")
        elif kind in ("stop", "stop a while"):
            victim.stopped = True
            self.message(victim.host, x.Stopped(attempt, victim.rank, self.now))
            if kind == "stop a while":
                self.after(self.random.uniform(0, 3), self.resume, victim)
        elif kind == "hang":
            victim.hung = True
        elif kind in ("long save", "slow step"):
            victim.hung = True
            if kind == "long save":
                self.say(victim, "checkpoint")
            self.after(self.random.uniform(0, 1), setattr, victim, "hung", False)
        elif kind == "preempt all":
            for process in living:
                self.after(self.random.uniform(0, 3), self.exit, process, 75, "stop")
        elif kind in ("agent dies", "host vanishes", "cut off"):
            returns = kind == "agent dies" or self.random.random() < 0.6
            self.agent_dies(victim.host, returns, kind == "cut off")

    def resume(self, process: Process) -> None:
        if process.alive:
            process.stopped = False
            self.message(process.host, x.Continued(process.attempt, process.rank, self.now))

    def exit(self, process: Process, code: int, phase: str) -> None:
        if not process.alive:
            return
        if process.stopped and code != -9:
            self.after(0.5, self.exit, process, code, phase)
            return
        if phase:
            self.say(process, phase, "KeyError: 7" if phase == "failed" else "")
        process.alive = False
        self.message(process.host, x.Exited(process.attempt, process.rank, code, self.now))

    def kill(self, attempt: int, host: str) -> None:
        if host not in self.up:
            return
        for process in self.of(attempt):
            if process.host == host:
                self.exit(process, -9, "wait")
        if self.random.random() > 0.01:  # else the proof never comes
            self.message(host, x.Gone(attempt, host))

    def say(self, process: Process, phase: str, error: str = "") -> None:
        if self.silent or not process.alive:
            return
        changed = int(self.now * 1e9) + process.sequence
        process.sequence += 1
        beat = Beat(phase, self.done, self.done, changed, True, error)
        told = x.Progress(process.attempt, process.rank, beat, self.now)
        self.message(process.host, told, reliable=phase in ("done", "failed"))
