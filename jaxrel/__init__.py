"""Reliable JAX training: killed, resumed on other devices, and the same bits at the end."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrel.checkpoint import Checkpointer
    from jaxrel.ledger import Ledger
    from jaxrel.throughput.meter import ThroughputMeter
    from jaxrel.train.attach import attach, join
    from jaxrel.train.loop import Trainer
    from jaxrel.train.state import TrainState
    from jaxrel.train.step import make_train_step

__version__ = "0.1.0"
__all__ = [
    "Checkpointer", "Ledger", "ThroughputMeter", "TrainState", "Trainer", "__version__", "attach",
    "join", "make_train_step",
]  # fmt: skip

_HOMES = {
    "TrainState": "jaxrel.train.state",
    "make_train_step": "jaxrel.train.step",
    "Trainer": "jaxrel.train.loop",
    "Checkpointer": "jaxrel.checkpoint",
    "Ledger": "jaxrel.ledger",
    "ThroughputMeter": "jaxrel.throughput.meter",
    "attach": "jaxrel.train.attach",
    "join": "jaxrel.train.attach",
}


def __getattr__(name: str) -> Any:
    """Import a public name's module at its first use, so that `import jaxrel` is instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxrel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
