"""What happens in a run: the typed events of which its ledger is made.

Every event is a frozen dataclass of JSON values. An event's time, attempt and writer are no
part of it: the ledger adds them (`Record`). Times in fields are seconds that something took.

A reader knows every event that some version wrote; one it does not know is kept as
`Unknown`, and counted. A field may be added with a default and is never renamed: what needs
another meaning gets another name.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

VERSION = 1
"""Of the line format; a reader refuses a later one."""

Phase = Literal[
    "start", "join", "restore", "compile", "train", "evaluation", "checks", "checkpoint", "stop"
]
"""What a process is at: `train` is everything from the first compiled step on."""

FailureKind = Literal[
    "exit", "signal", "hang", "stopped", "exception", "oom", "preempted", "host_lost", "hardware",
    "diverged", "storage",
]  # fmt: skip


# Of the leader


@dataclass(frozen=True)
class JobStarted:
    """A supervised job begins, for the first time or again."""

    command: list[str]
    hosts: list[str]
    processes: int
    spares: int = 0
    """Of the hosts, the last, which are not used at first."""


@dataclass(frozen=True)
class AttemptStarted:
    """The processes of an attempt are about to be spawned."""

    hosts: list[str]
    """Of each rank."""
    coordinator: str


@dataclass(frozen=True)
class FailureDetected:
    """The attempt cannot go on."""

    kind: FailureKind
    rank: int | None
    """Who began it; None when nothing tells."""
    host: str | None
    detail: str
    """One line for a person, and the evidence."""
    after_s: float | None
    """Since it happened: an exit's own time, else the last progress of the rank."""
    following: list[int] = field(default_factory=list)
    """Ranks that died or hung because of it."""
    step: int | None = None
    """Completed steps of the rank at that time."""


@dataclass(frozen=True)
class HostAway:
    """The agent of a host is gone."""

    host: str
    reason: str


@dataclass(frozen=True)
class HostBack:
    """It is there again; the next attempt may use it."""

    host: str


@dataclass(frozen=True)
class HostDrained:
    """No later attempt of the job uses this host."""

    host: str
    reason: str


@dataclass(frozen=True)
class GangDead:
    """No process of the attempt is left."""


@dataclass(frozen=True)
class AttemptEnded:
    """How the attempt ended; its processes are gone."""

    exit: int
    """The exit code that stands for all of them."""
    reason: str = ""


@dataclass(frozen=True)
class JobEnded:
    """The leader leaves."""

    exit: int
    reason: str = ""


# Of a worker; those of rank 0 are the run's


@dataclass(frozen=True)
class WorkerStarted:
    """A process of the run; the first event of its segment."""

    process: int
    processes: int
    pid: int
    host: str


@dataclass(frozen=True)
class PhaseBegan:
    """From here on the process is at `phase`."""

    phase: Phase


@dataclass(frozen=True)
class Resumed:
    """The state is ready; the next completed step is `step` + 1."""

    step: int
    """0 in a new run."""
    devices: int
    processes: int
    degrees: dict[str, int] = field(default_factory=dict)
    state_digest: str | None = None


@dataclass(frozen=True)
class StepCompleted:
    """One update is complete. Written by rank 0 alone."""

    step: int
    """Completed updates, this one included."""
    loss: float | None = None
    """None where it is not finite or not known."""
    grad_norm: float | None = None
    learning_rate: float | None = None
    """As applied in this step."""
    tokens: int | None = None
    """Trained on in this step."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Of per-group loss and gradient norm: quantiles, the largest and their places, or all."""
    data_s: float = 0.0
    """Of the time since the event before: waiting for the batch,"""
    checkpoint_s: float = 0.0
    """blocked by a save,"""
    evaluation_s: float = 0.0
    """evaluating,"""
    checks_s: float = 0.0
    """checking. The rest is the step itself."""
    step_s: float | None = None
    """What the step took, without saves and evaluations: the wait for data and the four below."""
    dispatch_s: float = 0.0
    """Of that: starting the step, with idle devices,"""
    compute_s: float = 0.0
    """the devices' own time, exposed communication apart,"""
    communication_s: float = 0.0
    """collectives that no computation covered,"""
    other_s: float = 0.0
    """the loop itself, with idle devices."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1; None where FLOPs or peak are not known."""
    hfu: float | None = None


@dataclass(frozen=True)
class MeterStarted:
    """What MFU and HFU mean in the steps of this attempt."""

    definition: str
    peak_flops: float | None
    model_flops: float | None
    """Of one step, on all devices."""
    hardware_flops: float | None


@dataclass(frozen=True)
class ThroughputDrifted:
    """Steps take longer than they did, and have for a while."""

    step: int
    before_s: float
    now_s: float


@dataclass(frozen=True)
class StepSampled:
    """Where the devices of rank 0 spent one step, from the profiler: means over them.

    Compute, exposed communication, callback, other and idle sum to `step_s`.
    """

    step: int
    step_s: float
    compute_s: float
    exposed_communication_s: float
    overlapped_communication_s: float
    """Beside compute, and part of it."""
    callback_s: float
    other_s: float
    idle_s: float
    slowest: str
    """The device that computed longest."""
    source: str
    """The form of the trace."""
    cost_s: float
    """What taking the sample took."""


@dataclass(frozen=True)
class Evaluated:
    """The held-out loss after `step` updates."""

    step: int
    loss: float | None
    rows: int
    seconds: float


@dataclass(frozen=True)
class CheckpointSaved:
    """The checkpoint of `step` is complete on disk."""

    step: int
    seconds: float
    """From the start of the save to its commit."""
    blocking_s: float
    """Of that, what the loop waited."""
    state_digest: str
    bytes: int | None = None


@dataclass(frozen=True)
class LocalSaved:
    """The local checkpoint of `step` is complete on this process's host."""

    step: int
    seconds: float
    blocking_s: float
    state_digest: str


@dataclass(frozen=True)
class CheckpointFailed:
    """The save of `step` failed."""

    step: int
    error: str


@dataclass(frozen=True)
class IntervalPlanned:
    """After the save of `step`, the next one is due in `steps`; the rest is why."""

    step: int
    steps: int
    decided_by: str
    """`optimum`, `least` (one write, or one step) or `unmeasured`."""
    optimal_s: float | None
    mtbf_s: float
    step_s: float | None
    cost_s: float | None
    write_s: float | None
    failures: int
    observed_s: float
    prior_failures: float
    prior_s: float
    share: float = 1.0
    """Of the failures, those that these saves are for: with two tiers each has its own."""
    tier: str = "durable"


@dataclass(frozen=True)
class CheckpointRefused:
    """The checkpoint of `step` turned out to be damaged, and an older one counts."""

    step: int
    reason: str


@dataclass(frozen=True)
class Finished:
    """The run is complete and its last step is saved."""

    step: int
    state_digest: str
    tokens: int | None = None
    """Trained on in the whole run, each counted once whatever was lost and done again."""
    attempt_tokens: int | None = None
    """Of these, in the attempt that completed it."""


@dataclass(frozen=True)
class WorkerFailed:
    """The process is about to leave with an error."""

    error: str
    """`Type: message`, one line."""
    exit: int


@dataclass(frozen=True)
class RecordsLost:
    """A sink (this ledger, TensorBoard) could not be written for a while."""

    sink: str
    count: int
    error: str


@dataclass(frozen=True)
class Unknown:
    """An event of a version to come, or one that a user wrote."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)


Event = (
    JobStarted | AttemptStarted | FailureDetected | HostAway | HostBack | HostDrained | GangDead
    | AttemptEnded | JobEnded
    | WorkerStarted | PhaseBegan | Resumed | MeterStarted | StepCompleted | ThroughputDrifted
    | StepSampled | Evaluated | CheckpointSaved | LocalSaved | CheckpointFailed | CheckpointRefused
    | IntervalPlanned | Finished | WorkerFailed | RecordsLost | Unknown
)  # fmt: skip

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}
_FIELDS = {name: {f.name for f in fields(kind)} for name, kind in _KINDS.items()}


@dataclass(frozen=True)
class Record:
    """An event in the ledger."""

    time_us: int
    """Microseconds since the epoch, by its writer: within one segment it never steps back."""
    attempt: int
    """Of the run, from 1; 0 for what belongs to none."""
    source: str
    """`leader`, or `rank0`, `rank1`, ..."""
    event: Event


def to_json(record: Record) -> dict[str, Any]:
    """A record as one JSON object."""
    event = record.event
    envelope = {"v": VERSION, "t": record.time_us, "attempt": record.attempt, "by": record.source}
    if isinstance(event, Unknown):
        return envelope | {"event": event.name} | event.values
    return envelope | {"event": type(event).__name__} | asdict(event)


def from_json(document: Mapping[str, Any]) -> Record:
    """The record that `document` describes.

    Raises ValueError when it is none, or of a later version.
    """
    try:
        version, time_us, name = document["v"], document["t"], document["event"]
        attempt, source = document["attempt"], document["by"]
    except (KeyError, TypeError):
        raise ValueError(f"not a record of a ledger: {str(document)[:80]}") from None
    if version != VERSION:
        raise ValueError(f"version {version}: this reads version {VERSION}")
    numbers, texts = (type(time_us), type(attempt)), (type(source), type(name))
    if numbers != (int, int) or texts != (str, str):
        raise ValueError(f"not a record of a ledger: {str(document)[:80]}")
    values = {k: x for k, x in document.items() if k not in ("v", "t", "attempt", "by", "event")}
    kind = _KINDS.get(name)
    if kind is None or kind is Unknown:
        return Record(time_us, attempt, source, Unknown(str(name), values))
    try:
        event = kind(**{k: x for k, x in values.items() if k in _FIELDS[name]})
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
    return Record(time_us, attempt, source, event)
