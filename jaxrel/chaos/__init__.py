"""Faults on purpose, by configuration alone: no room of jaxrel knows that they are there."""

from jaxrel.chaos.faults import install

__all__ = ["install"]
