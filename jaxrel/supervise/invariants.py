"""What must hold after every event of every job, for tests and simulated runs."""

from collections import Counter
from collections.abc import Iterable, Iterator

from jaxrel.events import FailureDetected
from jaxrel.supervise import exchange as x
from jaxrel.supervise.core import LIVE, Asked, Stage, State, wake


def violations(state: State, now: float, actions: Asked = ()) -> list[str]:
    """What must never be, in words, of a job after an event and of what it asked for then.

    - Processes exist only in a stage that will see to their end, and those of one attempt are
      gone or cannot be left before the next one starts.
    - Nothing waits without a deadline, and none has passed. The one exception is a command that
      has never reported progress: nobody can tell a hang of it.
    - An attempt has a legal number of hosts; each is there, and none was drained.
    - A failure is followed by a decision: another attempt, or the end of the job with a reason.
    """
    waits = (f"{state.stage}: {found}" for found in _waits(state, now))
    return [*_processes(state), *waits, *_starts(state, actions), *_failures(state, actions)]


def _processes(state: State) -> Iterator[str]:
    owing = {host.name: host.owes for host in state.roster.hosts if host.owes}
    if state.stage not in (*LIVE, Stage.ENDED) and owing:
        yield f"{state.stage}: processes may exist on {sorted(owing)}"
    if old := [name for name, attempt in owing.items() if attempt != state.attempt]:
        yield f"processes of an attempt before {state.attempt} may exist on {old}"
    if state.stage not in LIVE or state.stage is Stage.STOPPING:
        return
    living = {rank.host for rank in state.ranks if rank.alive}
    if unseen := living - owing.keys():
        yield f"nobody will ask for a proof of death on {sorted(unseen)}"
    used = {rank.host for rank in state.ranks}
    for host in state.roster.hosts:
        if host.drained and host.name in used:
            yield f"{host.name} is used, though drained: {host.drained}"


def _waits(state: State, now: float) -> Iterator[str]:
    wakes = wake(state)
    silent = state.stage is Stage.RUNNING and not state.speaks
    if wakes is None and state.stage is not Stage.ENDED and not silent:
        yield "waits without a deadline"
    if wakes is not None and wakes <= now:
        yield f"the deadline passed {now - wakes:g} s ago"
    if state.stage is Stage.STOPPING and state.outcome is None:
        yield "what follows is not decided"


def _starts(state: State, actions: Asked) -> Iterator[str]:
    starts = [action for action in actions if isinstance(action, x.StartAttempt)]
    if len(starts) > 1:
        yield f"{len(starts)} attempts started at once"
    for start in starts:
        places, policy = Counter(start.hosts), state.policy
        if start.attempt != state.attempt:
            yield f"attempt {start.attempt} started as {state.attempt}"
        if len(places) not in policy.legal or set(places.values()) != {policy.processes_per_host}:
            yield f"attempt {start.attempt} on {dict(places)}: not legal"
        for host in state.roster.hosts:
            if host.name in places and (not host.up or host.presumed):
                yield f"attempt {start.attempt} on {host.name}, not there or not looked at"


def _failures(state: State, actions: Iterable[x.Action]) -> Iterator[str]:
    records = (action.event for action in actions if isinstance(action, x.Record))
    failed = any(isinstance(event, FailureDetected) for event in records)
    if failed and (state.outcome is None or not state.outcome.reason):
        yield "a failure, and what follows is not decided"
