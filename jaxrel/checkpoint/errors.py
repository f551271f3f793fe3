"""What can be wrong with a checkpoint, or with writing one."""

from jaxrel.exit_codes import DataRefusedError, FailedError

_NAMED = 8
"""Leaves that an error message names before it counts the rest."""

_PASSING = ("Input/output error", "Stale file handle", "Connection timed out", "UNAVAILABLE",
            "temporarily unavailable", "DEADLINE_EXCEEDED", "ABORTED")  # fmt: skip
"""In messages of storage whose trouble may pass."""


class SaveFailedError(FailedError):
    """A save that failed or is overdue; `step` says which.

    `may_pass` is True where the storage's trouble may pass, so that another try makes sense.
    """

    def __init__(self, step: int, what: str, *, may_pass: bool = False) -> None:
        super().__init__(f"the save of step {step} {what}")
        self.step, self.may_pass = step, may_pass


class DamagedError(DataRefusedError):
    """What is on disk is not what was saved, or cannot be read: an older one may be good.

    `proven` is False where only the reading failed, as by a fault of the storage.
    """

    def __init__(self, message: str, proven: bool = True) -> None:
        super().__init__(message)
        self.proven = proven


def some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    rest = len(names) - _NAMED
    return "; ".join(names[:_NAMED]) + (f"; and {rest} more" if rest > 0 else "")


def may_pass(line: str) -> bool:
    """Whether a message of the storage tells of trouble that may pass."""
    return any(sign in line for sign in _PASSING)


def one_line(error: BaseException) -> str:
    """One line on the error that started a chain; storage puts the reason at the end."""
    while error.__cause__ is not None:
        error = error.__cause__
    reason = " ".join(str(error).split()).split(" [tensorstore_spec=")[0]
    text = f"{type(error).__name__}: {reason}".removesuffix(": ")
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-300:]}"
