"""Which checkpoints there are to go on from, in both tiers, and which turned out damaged."""

import logging

import jax
from etils import epath

from jaxrel.checkpoint import listing
from jaxrel.checkpoint.errors import DamagedError, some
from jaxrel.checkpoint.keeper import Keeper
from jaxrel.checkpoint.local import LocalTier, Whole
from jaxrel.checkpoint.readback import bad_leaves
from jaxrel.checkpoint.together import agreed
from jaxrel.exit_codes import DataRefusedError, FailedError

log = logging.getLogger(__name__)


class Candidates:
    """The part of a `Checkpointer` that looks at what is on disk; collective where it says so."""

    def __init__(self, directory: epath.Path, keeper: Keeper, local: LocalTier | None) -> None:
        self.directory = directory
        self._keeper, self._local = keeper, local
        self.whole: dict[int, Whole] = {}
        """Local steps that may be restored, and are not durable; of the last look."""
        self._told: list[tuple[int, str]] = []

    def newest(self, proven_from: int | None) -> int | None:
        """As `Checkpointer.latest`. Collective."""
        local = max(self.look(), default=None)

        def ask() -> int | None:
            while True:
                try:
                    step = listing.newest(self.directory)
                except DataRefusedError:
                    if local is None:
                        raise
                    return None
                if step is None or proven_from is None or step < proven_from or self._sound(step):
                    return step

        return max((step for step in (agreed(ask), local) if step is not None), default=None)

    def look(self) -> dict[int, Whole]:
        """The local steps that may be restored and are not durable, read anew. Collective."""
        if self._local is not None:
            durable = agreed(self.judged)[0]
            self.whole = {w.step: w for w in self._local.whole() if w.step not in durable}
        return self.whole

    def judged(self) -> tuple[list[int], dict[str, str]]:
        """Steps that can be restored for all that is known, the newest first.

        And why, by step, the others are not.
        """
        entries = listing.scan(self.directory)
        good = [entry.step for entry in reversed(entries) if entry.good]
        return good, {str(e.step): e.why for e in entries if e.useless}

    def told(self) -> list[tuple[int, str]]:
        """Step and reason of what was condemned since this was called last."""
        found, self._told = self._told, []
        return found

    def condemn(self, step: int, error: DamagedError, *, mark: bool) -> None:
        """Tell of a damaged checkpoint; where the damage is proven, process 0 marks it."""
        log.error("%s; an older checkpoint is tried", error)
        self._told.append((step, str(error)))
        if jax.process_index() == 0 and mark:
            self._keeper.mark(step, corrupt=str(error))

    def _sound(self, step: int) -> bool:
        """Whether a checkpoint is what was saved, read back now; else it is condemned."""
        path = listing.folder(self.directory, step)
        try:
            bad = bad_leaves(path)
        except OSError as error:
            raise FailedError(f"checkpoint {path} cannot be read: {error}") from error
        if not bad:
            return True
        error = DamagedError(f"checkpoint {path} is corrupt: digests differ in {some(bad)}")
        self.condemn(step, error, mark=True)
        if step in self.judged()[0]:
            raise FailedError(f"{error}; and it cannot be marked")
        return False
