"""What a walk of a program adds up."""

from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class Uncounted:
    """An operation that may hold contractions, of which nobody can say how many."""

    name: str
    """The primitive, kernel or custom call."""
    reason: str
    where: str
    """The line of the program that it comes from."""


@dataclass
class Tally:
    """Sums over part of a program. Fractions appear where a share of it is declared."""

    contraction: dict[str, Fraction | int] = field(default_factory=dict)
    """FLOPs of contractions, by operation."""
    integer: Fraction = Fraction(0)
    """Operations of contractions among integers."""
    elementwise: Fraction = Fraction(0)
    transcendental: Fraction = Fraction(0)
    uncounted: dict[Uncounted, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    devices: int = 1
    """Devices of the largest mesh that the program names."""

    def add(self, other: "Tally", times: Fraction | int = 1) -> None:
        """Add `other`, `times` over; what never runs, or is declared not to count, says nothing."""
        for name, flops in other.contraction.items():
            self.contraction[name] = self.contraction.get(name, 0) + flops * times
        self.integer += other.integer * times
        self.elementwise += other.elementwise * times
        self.transcendental += other.transcendental * times
        if times:
            self.mention(other)

    def mention(self, other: "Tally") -> None:
        """Take over what `other` says, without its numbers."""
        self.uncounted |= other.uncounted
        self.notes |= other.notes
        self.devices = max(self.devices, other.devices)

    def size(self) -> tuple[Fraction, Fraction]:
        """For comparison: contractions first, then the rest."""
        return Fraction(sum(self.contraction.values())), self.elementwise + self.transcendental
