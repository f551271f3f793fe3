"""What a person at the terminal is told of a job."""

from pathlib import Path

from jaxrel.events import (
    AttemptEnded,
    Event,
    FailureDetected,
    HostAway,
    HostBack,
    HostDrained,
)
from jaxrel.exit_codes import ExitCode
from jaxrel.supervise.console import Console
from jaxrel.supervise.core import Stage, State
from jaxrel.supervise.exchange import End, StartAttempt
from jaxrel.supervise.policy import Policy
from jaxrel.supervise.verdict import Again
from jaxrel.supervise.workers import log_path, stacks_path

_LINES = 8
"""Of the culprit's log that are shown."""


class Narrator:
    """Short lines on standard error, each beginning with `launch:`."""

    def __init__(self, console: Console, run_dir: Path) -> None:
        """`run_dir` is where stacks and logs are."""
        self._console, self._run_dir, self._wanted = console, run_dir, 1

    def begins(self, policy: Policy) -> None:
        """The job, and how long it waits for what."""
        self._wanted = policy.wanted
        self._say(f"run {self._run_dir}; deadlines: {policy.ladder()}")

    def starts(self, action: StartAttempt, coordinator: str) -> None:
        """An attempt."""
        names = dict.fromkeys(action.hosts)
        fewer = f" ({len(names)} of {self._wanted} hosts)" if len(names) < self._wanted else ""
        hosts = ", ".join(names) + fewer
        count = len(action.hosts)
        processes = f"{count} process{'es' if count != 1 else ''}"
        self._say(f"attempt {action.attempt} on {hosts}; {processes}; coordinator {coordinator}")

    def waits(self, state: State) -> None:
        """The next attempt is held up."""
        missing = [h.name for h in state.roster.hosts if not h.usable and not h.drained]
        fewer_s = state.policy.shrink_after_s
        self._say(f"waiting for {', '.join(missing)}; {fewer_s:g} s after its loss fewer must do")

    def tells(self, event: Event, state: State) -> None:
        """What has just been recorded."""
        match event:
            case FailureDetected():
                self._failure(event, state)
            case HostAway(host, why):
                self._say(f"{host} is lost: {why}")
            case HostBack(host):
                drained = state.roster[host].drained
                self._say(f"{host} is back{', and not used: it is drained' * bool(drained)}")
            case HostDrained(host, why):
                self._say(f"{host} is drained, this job does not use it again: {why}")
            case AttemptEnded() if state.outcome and isinstance(state.outcome.then, Again):
                if state.stage is Stage.ENDED:  # what was to follow has no hosts
                    return
                used, pause_s = state.budget.failures, state.outcome.then.pause_s
                when = f"in {pause_s:.1f} s" if pause_s else "at once"
                what = f"restart {used} of {state.budget.max_restarts}"
                if event.exit == ExitCode.PREEMPTED:
                    what = f"{event.reason}; restart"
                self._say(f"{what} {when}")
            case _:
                pass

    def ended(self, end: End) -> None:
        """The end of the job."""
        self._say(f"ended with {int(end.code)}: {end.reason}" if end.reason else "done")

    def _failure(self, event: FailureDetected, state: State) -> None:
        who = "no rank can be named" if event.rank is None else f"rank {event.rank} on {event.host}"
        ago = "" if event.after_s is None else f" ({event.after_s:.1f} s ago)"
        self._say(f"attempt {state.attempt}: {who}: {event.kind}: {event.detail}{ago}")
        suspects = event.following if event.rank is None else [event.rank]
        stacks = [stacks_path(self._run_dir, state.attempt, r.rank) for r in state.ranks]
        if any(path.exists() and path.stat().st_size for path in stacks):  # made empty at first
            self._say(f"stacks of this attempt: {stacks[0].parent}/attempt-{state.attempt}-*")
        for rank in suspects[:2] if event.kind != "preempted" else []:
            path = log_path(self._run_dir, state.attempt, rank)
            lines = _last_lines(path)
            self._say(f"log of rank {rank}: {path}{', its last lines:' if lines else ''}")
            for line in lines:
                self._say(f"  {line}")

    def _say(self, line: str) -> None:
        self._console.say(f"launch: {line}")


def _last_lines(path: Path) -> list[str]:
    """The last lines of a log that say something."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = (line for line in text.splitlines() if line.strip() and line[:7] != "[Gloo] ")
    return [line[:200] for line in lines][-_LINES:]
