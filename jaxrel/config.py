"""The configuration of a run: one tree of frozen dataclasses.

A YAML file gives the values (`jaxrel.config_file`) and `--section.key value` overrides them
(`jaxrel.cli`). `check` refuses values and combinations that cannot work, before anything is
compiled or written.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from jaxrel.exit_codes import UsageError


@dataclass(frozen=True)
class RunConfig:
    """Where the run lives and how long it is."""

    dir: str = "run"
    """Directory of the run: configuration, checkpoints, ledger, TensorBoard files."""
    seed: int = 0
    """Seed of parameters, dropout and data order."""
    steps: int = 60
    """Completed updates at which the run is finished."""
    print_every: int = 10
    """Steps between plain progress lines (a terminal gets a live line instead)."""
    compiled: str | None = None
    """Directory of compiled programs, so that a restart compiles nothing; None is `compiled`
    inside the run. JAX_COMPILATION_CACHE_DIR wins."""


@dataclass(frozen=True)
class MeshConfig:
    """Parallelism degrees; one of them may be -1, which takes the devices that are left."""

    data: int = -1
    """Replicas of the parameters over which the optimizer state is sharded (ZeRO)."""
    fsdp: int = 1
    """Shards of the parameters, gathered a layer at a time."""
    tensor: int = 1
    """Shards of each layer's matrices, left to the compiler."""
    cpu_devices: int | None = None
    """Simulate this many CPU devices in each process; None uses the machine's devices."""
    axes: dict[str, int] = field(default_factory=dict)
    """Further named mesh axes and their degrees; recorded, for models that use them."""
    rules: dict[str, str] = field(
        default_factory=lambda: {
            "heads": "tensor",
            "kv_heads": "tensor",
            "mlp": "tensor",
            "vocabulary": "tensor",
        }
    )
    """Logical axis of a parameter to mesh axis."""


@dataclass(frozen=True)
class JobConfig:
    """How the processes of a job find each other."""

    coordinator: str | None = None
    """`host:port` of process 0; None for one process, or for what JAX detects."""
    process_id: int | None = None
    """This process's number, from 0."""
    num_processes: int | None = None
    """Processes in the job."""
    detect: bool = False
    """Let JAX detect the job from its cluster environment."""
    join_deadline_s: float = 120.0
    """Seconds to wait for all processes; then the missing ones are named."""


@dataclass(frozen=True)
class BatchConfig:
    """The global batch and how it is divided."""

    global_size: int = 32
    """Sequences in a global batch."""
    sequence: int = 128
    """Tokens a sequence predicts."""
    groups: int = 8
    """Equal parts of the global batch, fixed for the life of the run; a power of two."""
    reduction: Literal["fast", "invariant"] = "fast"
    """`invariant` gives the same bits on any number of devices on data and fsdp."""


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    corpus: str | None = None
    """Directory made by `jaxrel data build`; None builds one from Python's own library."""
    pipeline: str | None = None
    """`module:function` that returns a Grain pipeline of your own, instead of a corpus."""
    threads: int = 2
    """Reader threads in each process."""
    prefetch: int = 4
    """Batches read ahead in each process."""
    skip: tuple[int, ...] = ()
    """Batch positions left out of the data order."""


@dataclass(frozen=True)
class ModelConfig:
    """The reference decoder-only transformer."""

    layers: int = 4
    """Transformer blocks."""
    hidden: int = 64
    """Width of the residual stream."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; divides `heads`."""
    head_dim: int = 16
    """Width of one head; even."""
    mlp: int = 192
    """Width of the gated feed-forward layer."""
    vocabulary: int = 256
    """Token ids; at least the tokenizer's."""
    dropout: float = 0.1
    """Share of activations dropped after attention and feed-forward, in [0, 1)."""
    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""
    remat: Literal["none", "dots", "full"] = "full"
    """What the backward pass recomputes: nothing, all but matrix products, or all."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of activations and gathered layers; parameters stay float32."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a warm-up and a cosine decay."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    warmup_steps: int = 10
    """Steps of linear warm-up from 0."""
    final_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of the peak."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    clip_norm: float = 1.0
    """Global gradient norm above which the gradient is scaled down; 0 turns it off."""


@dataclass(frozen=True)
class EvaluationConfig:
    """The loss on held-out text."""

    every: int = 0
    """Steps between evaluations, the last step included; 0 never evaluates."""
    batches: int = 8
    """Global batches of the held-out split, always the same ones; all of it if it has fewer."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, when and where."""

    dir: str | None = None
    """Directory of the checkpoints; None is `checkpoints` inside the run."""
    interval: int | Literal["auto"] = 20
    """Steps between checkpoints; the last step is always saved. `auto` plans them from what steps
    and saves are measured to take and how often the run fails."""
    local_dir: str | None = None
    """A directory on a RAM disk or NVMe of each host (`/dev/shm/jaxrel`), for checkpoints between
    the durable ones; `{host}` in it stands for the host's name."""
    local_interval: int | Literal["auto"] = "auto"
    """Steps between local checkpoints, with `local_dir`; `auto` plans them too."""
    keep: int = 3
    """Newest good checkpoints kept, at least 2."""
    keep_every: int = 0
    """Steps that this divides are kept for ever; 0 is none."""
    keep_best: int = 0
    """How many of those evaluated at their own step, with the lowest held-out loss, are kept."""
    verify_mb_s: float = 100.0
    """Megabytes a second at which each checkpoint is read back and proven while training goes
    on; 0 never does."""
    trust_after: int = 100
    """Healthy steps after which a verified checkpoint counts as trusted."""
    cast: tuple[str, ...] = ()
    """Patterns of the paths of leaves (`params/*`) that may be restored into another dtype."""
    partial: tuple[str, ...] = ()
    """Patterns of the paths of leaves that the checkpoint may lack, or have besides."""
    deadline_s: float = 600.0
    """Seconds a save may take before the run gives up on it."""


@dataclass(frozen=True)
class ThroughputConfig:
    """How the use of the machine is measured."""

    peak_flops: float | Literal["measured"] | None = None
    """Peak FLOP/s of one JAX device, for MFU; null takes it from the table of devices, and
    `measured` times matrix products at the start, for CPUs and devices that are not in it."""
    sample_every: int = 0
    """Of so many steps one is profiled, to tell computation from communication; 0 profiles none."""


@dataclass(frozen=True)
class ChaosConfig:
    """Faults on purpose, to see that a run survives them; by default none."""

    raise_at_step: int | None = None
    """Raise an exception instead of this update, from 1."""
    exit_at_step: int | None = None
    """Leave at once instead of this update."""
    fail_writes_at_step: int | None = None
    """From this update on no file can be written, as on a full disk."""
    kill_rate: float = 0.0
    """Probability with which each update is met by SIGKILL."""
    seed: int = 0
    """Of these draws; process and attempt go into them."""
    rank: int | None = None
    """The only process that suffers; null is each."""


@dataclass(frozen=True)
class Config:
    """A training run."""

    run: RunConfig = field(default_factory=RunConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    job: JobConfig = field(default_factory=JobConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)
    chaos: ChaosConfig = field(default_factory=ChaosConfig)

    def checkpoint_dir(self) -> str:
        """Where the checkpoints are, with the default filled in."""
        return self.checkpoint.dir or f"{self.run.dir}/checkpoints"


def check(config: Config) -> None:
    """Refuse values out of range and combinations that cannot work.

    Needs no device: a degree of -1 is not judged, so call it again once the mesh has
    resolved the degrees. Raises UsageError, `section.key: got VALUE: what would be right`.
    """
    for rules in (_ranges, _mesh, _batch, _model, _job, _data):
        for key, wrong, right in rules(config):
            if wrong:
                raise UsageError(f"{key}: got {show(_lookup(config, key))}: {right}")


def fingerprint(config: Config) -> str:
    """A hash of every value of the configuration: 16 hex digits."""
    text = json.dumps(asdict(config), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def show(value: Any) -> str:
    """A value as a message shows it: on one line, cut when long."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _lookup(config: Config, key: str) -> Any:
    """The value at a dotted key; below a mapping, the key in the mapping."""
    node: Any = config
    for name in key.split(".", 2):
        node = node[name] if isinstance(node, dict) else getattr(node, name)
    return node


Rules = Iterator[tuple[str, bool, str]]
"""Dotted key, whether it is wrong, what would be right; each may rely on those before it."""

_AT_LEAST = {
    "run.steps": 1,
    "run.print_every": 1,
    "batch.global_size": 1,
    "batch.sequence": 1,
    "batch.groups": 1,
    "data.threads": 1,
    "data.prefetch": 1,
    "model.layers": 1,
    "model.hidden": 1,
    "model.heads": 1,
    "model.kv_heads": 1,
    "model.head_dim": 2,
    "model.mlp": 1,
    "model.vocabulary": 2,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0,
    "optimizer.clip_norm": 0,
    "evaluation.every": 0,
    "evaluation.batches": 1,
    "throughput.sample_every": 0,
    "checkpoint.keep_every": 0,
    "checkpoint.keep_best": 0,
    "checkpoint.verify_mb_s": 0,
    "checkpoint.trust_after": 0,
}
_POSITIVE = (
    "job.join_deadline_s",
    "model.rope_theta",
    "optimizer.learning_rate",
    "checkpoint.deadline_s",
)
_SHARES = ("model.dropout", "optimizer.b1", "optimizer.b2")


def _ranges(c: Config) -> Rules:
    for key, low in _AT_LEAST.items():
        yield key, not low <= _lookup(c, key) < math.inf, f"expected at least {low}"
    for key in _POSITIVE:
        yield key, not 0 < _lookup(c, key) < math.inf, "expected a finite number above 0"
    for key in _SHARES:
        yield key, not 0 <= _lookup(c, key) < 1, "expected a number in [0, 1)"
    for name in ("raise_at_step", "exit_at_step", "fail_writes_at_step"):
        step = getattr(c.chaos, name)
        yield f"chaos.{name}", step is not None and step < 1, "expected at least 1, or null"
    yield "chaos.kill_rate", not 0 <= c.chaos.kill_rate < 1, "expected a number in [0, 1)"
    rank = c.chaos.rank
    yield "chaos.rank", rank is not None and rank < 0, "expected at least 0, or null"
    peak = c.throughput.peak_flops
    wrong = isinstance(peak, float) and not 0 < peak < math.inf
    yield "throughput.peak_flops", wrong, "expected FLOP/s of one device, measured, or null"
    fraction = c.optimizer.final_fraction
    yield "optimizer.final_fraction", not 0 <= fraction <= 1, "expected a number in [0, 1]"
    yield "run.seed", not 0 <= c.run.seed < 2**32, "expected a whole number in [0, 2**32)"
    for name in ("interval", "local_interval"):
        interval = getattr(c.checkpoint, name)
        wrong = interval != "auto" and interval < 1
        yield f"checkpoint.{name}", wrong, "expected at least 1, or auto"
    local = c.checkpoint.local_dir
    wrong = local is not None and local[:1] not in ("/", "~")
    yield "checkpoint.local_dir", wrong, "expected an absolute path on each host, or null"
    reason = "expected at least 2, so that there is an older one when the newest is damaged"
    yield "checkpoint.keep", c.checkpoint.keep < 2, reason
    yield "run.dir", not c.run.dir.strip(), "expected the path of a directory"
    yield "checkpoint.dir", c.checkpoint.dir == "", "expected a path, or null for inside the run"


def _mesh(c: Config) -> Rules:
    own = {"data": c.mesh.data, "fsdp": c.mesh.fsdp, "tensor": c.mesh.tensor}
    for name in c.mesh.axes:
        yield "mesh.axes", name in own, f"{name} has a key of its own, mesh.{name}"
        yield "mesh.axes", not name.isidentifier(), f"{name!r} cannot name an axis"
    degrees = {f"mesh.{name}": degree for name, degree in own.items()}
    degrees |= {f"mesh.axes.{name}": degree for name, degree in c.mesh.axes.items()}
    right = "expected at least 1, or -1 for the devices that are left"
    for key, degree in degrees.items():
        yield key, degree < 1 and degree != -1, right
    free = [key for key, degree in degrees.items() if degree == -1]
    for key in free[1:]:
        yield key, True, f"only one degree may be -1, and {free[0]} is"
    cpus = c.mesh.cpu_devices
    yield "mesh.cpu_devices", cpus is not None and cpus < 1, "expected at least 1, or null"
    names = ["tensor", *c.mesh.axes]  # data and fsdp divide what the rules leave
    for logical, axis in c.mesh.rules.items():
        yield f"mesh.rules.{logical}", axis not in names, f"expected one of {', '.join(names)}"
    sizes = {name: getattr(c.model, name) for name in ("heads", "kv_heads", "mlp", "vocabulary")}
    for logical, axis in c.mesh.rules.items():
        degree = (own | c.mesh.axes)[axis]
        wrong = logical in sizes and sizes[logical] % degree != 0
        key = f"mesh.{axis}" if axis in own else f"mesh.axes.{axis}"
        yield key, wrong, f"must divide model.{logical}, which is {sizes.get(logical)}"


def _batch(c: Config) -> Rules:
    b, groups = c.batch, c.batch.groups
    yield "batch.groups", not _power_of_two(groups), "expected a power of two"
    multiple = f"expected a multiple of batch.groups, which is {groups}"
    yield "batch.global_size", b.global_size % groups != 0, multiple
    for name in ("data", "fsdp"):
        degree = getattr(c.mesh, name)
        odd = degree != -1 and not _power_of_two(degree)
        yield f"mesh.{name}", odd, f"expected a power of two, to divide batch.groups ({groups})"
    shards = max(c.mesh.data, 1) * max(c.mesh.fsdp, 1)
    few = f"expected at least mesh.data x mesh.fsdp, which is {shards}"
    yield "batch.groups", shards > groups, few


def _model(c: Config) -> Rules:
    m = c.model
    uneven = m.heads % m.kv_heads != 0
    yield "model.kv_heads", uneven, f"must divide model.heads, which is {m.heads}"
    yield "model.head_dim", m.head_dim % 2 != 0, "expected an even number, for rotary positions"


def _job(c: Config) -> Rules:
    j = c.job
    names = ("coordinator", "process_id", "num_processes")
    missing = [name for name in names if getattr(j, name) is None]
    some = 0 < len(missing) < 3
    for name in missing:
        yield f"job.{name}", some, "job.coordinator, process_id and num_processes go together"
    yield "job.detect", j.detect and not missing, "expected false when job.coordinator is given"
    if missing:
        return
    address = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s/]+):(\d{1,5})", j.coordinator or "")
    port = int(address[2]) if address else 0
    yield "job.coordinator", not 0 < port < 65536, "expected host:port"
    count = j.num_processes or 0
    yield "job.num_processes", count < 1, "expected at least 1"
    outside = not 0 <= (j.process_id or 0) < count
    yield "job.process_id", outside, f"expected 0 to {count - 1}, below job.num_processes"


def _data(c: Config) -> Rules:
    d = c.data
    both = d.corpus is not None and d.pipeline is not None
    yield "data.pipeline", both, "expected null when data.corpus is given"
    yield "data.corpus", d.corpus == "", "expected a directory, or null for Python's own library"
    unheld = d.pipeline is not None and c.evaluation.every > 0
    yield "evaluation.every", unheld, "expected 0 with data.pipeline, which holds nothing out"
    named = re.fullmatch(r"[\w.]+:[\w.]+", d.pipeline or "m:f")
    yield "data.pipeline", d.pipeline == "" or not named, "expected module:function"
    yield "data.skip", any(at < 0 for at in d.skip), "expected batch positions, from 0"
    yield "data.skip", len(set(d.skip)) < len(d.skip), "expected each position once"


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
