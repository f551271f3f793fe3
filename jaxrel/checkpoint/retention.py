"""Which checkpoints may go: pure, given what a directory holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrel.checkpoint.listing import Entry
from jaxrel.exit_codes import UsageError


@dataclass(frozen=True)
class Retention:
    """What stays; the newest trusted one always does, for a roll-back."""

    keep: int = 3
    """Newest good ones."""
    every: int = 0
    """Steps that this divides stay for ever; 0 is none."""
    best: int = 0
    """Of those with a metric, the ones with the lowest."""

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise UsageError(
                f"checkpoint.keep: got {self.keep}: expected at least 2, so that there is an older"
                " one to go back to when the newest turns out damaged"
            )
        for name in ("every", "best"):
            if getattr(self, name) < 0:
                raise UsageError(
                    f"checkpoint.keep_{name}: got {getattr(self, name)}: expected 0 or more"
                )

    def doomed(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those of `entries`, by rising step, that may be deleted.

        Nothing goes before there are `keep` good ones, and nothing that is newer than the
        oldest of these; what is damaged or was set aside goes once it is older than they are.
        """
        good = [entry for entry in entries if entry.good]
        if len(good) < self.keep:
            return []
        newest = good[-self.keep :]
        measured = sorted((e for e in good if e.metric is not None), key=_by_metric)
        kept = [*newest, *measured[: self.best], *[e for e in good if e.trusted][-1:]]
        steps = {e.step for e in kept} | {
            e.step for e in good if self.every and e.step % self.every == 0
        }
        oldest = newest[0].step
        return [
            e
            for e in entries
            if (e.good and e.step not in steps)
            or (e.status == "aside" and e.step <= oldest)
            or (e.status == "corrupt" and e.step < oldest)
        ]


def _by_metric(entry: Entry) -> tuple[float, int]:
    """The lowest metric first, of equals the newest."""
    assert entry.metric is not None
    return entry.metric, -entry.step
