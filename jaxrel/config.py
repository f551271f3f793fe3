"""The configuration of a run: one tree of frozen dataclasses.

A YAML file gives the values and `--section.key value` overrides them; the parser built on
these classes is `jaxrel.cli`. `check` refuses combinations that cannot work, before
anything is compiled or written.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RunConfig:
    """Where the run lives and how long it is."""

    dir: str = "run"
    """Directory of the run: configuration, checkpoints, ledger."""
    seed: int = 0
    """Seed of parameters, dropout and data order."""
    steps: int = 60
    """Completed updates at which the run is finished."""
    print_every: int = 10
    """Steps between plain progress lines (a terminal gets a live line instead)."""


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
        default_factory=lambda: {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocabulary": "tensor"}
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
class CheckpointConfig:
    """What is saved, when and where."""

    dir: str | None = None
    """Directory of the checkpoints; None is `checkpoints` inside the run."""
    interval: int = 20
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 3
    """Newest checkpoints kept."""
    deadline_s: float = 600.0
    """Seconds a save may take before the run gives up on it."""


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
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
