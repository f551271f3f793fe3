"""The checkpoint room: save, list and restore; `Checkpointer` imports JAX, the rest does not."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrel.checkpoint.checkpointer import Checkpointer as Checkpointer

__all__ = ["Checkpointer"]


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":
        from jaxrel.checkpoint.checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
