"""Exit codes of a worker and of `launch`, and the errors that carry them.

A `JaxrelError` is a message for a person: the command line prints it as one line and
exits with its code; nothing below the command line ever calls `sys.exit`.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a worker's exit says to whoever started it."""

    OK = 0
    """Finished, or already complete."""
    USAGE = 64
    """Bad configuration: do not restart."""
    DATA_REFUSED = 65
    """Checkpoint, structure or pipeline fingerprint does not match: do not restart."""
    FAILED = 70
    """Failed: a restart may help."""
    PREEMPTED = 75
    """Preempted and saved: restart."""
    SUSPECT_HOST = 76
    """This host is suspect: drain it, restart elsewhere."""
    DIVERGED = 77
    """Loss or gradients are no longer finite: a person must decide."""
    RESTARTS_EXHAUSTED = 79
    """The supervisor has used up its restarts."""
    INTERRUPTED = 130
    """Ctrl-C, not saved: as a shell reports SIGINT."""


class JaxrelError(Exception):
    """An error whose message is for a person."""

    code = ExitCode.FAILED


class UsageError(JaxrelError):
    """The configuration, a flag or an input cannot be used as given."""

    code = ExitCode.USAGE


class DataRefusedError(JaxrelError):
    """What is on disk does not match what this run asks for."""

    code = ExitCode.DATA_REFUSED


class FailedError(JaxrelError):
    """Something outside the configuration failed; a restart may help."""


class PreemptedError(JaxrelError):
    """The run was asked to stop, and everything is saved."""

    code = ExitCode.PREEMPTED


class DivergedError(JaxrelError):
    """A loss or gradient was not finite; the bad update was kept out."""

    code = ExitCode.DIVERGED
