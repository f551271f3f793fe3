"""The append-only record of a run, and what it says about the run's time."""

from jaxrel.ledger.writer import Ledger

__all__ = ["Ledger"]
