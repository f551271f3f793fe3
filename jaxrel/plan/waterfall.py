"""From the peak to MFU: the seconds of one step, each in one row.

Every row takes its measured seconds from what the rows before it left of the step, so that the
rows sum to the step whatever was measured. A difference that comes out below zero is noise: it
becomes 0, and a note tells it.
"""

from dataclasses import dataclass
from math import fsum

MODEL = "model FLOPs at peak"
RECOMPUTATION = "recomputation"
KERNELS = "small kernels"
COMPUTATION = "other computation"
COMMUNICATION = "communication"
STRAGGLERS = "stragglers"
BUBBLE = "pipeline bubble"
CALLBACKS = "host callbacks"
IDLE = "dispatch and idle devices"
DATA = "data loading"
REST = "unexplained"


@dataclass(frozen=True)
class Measured:
    """Seconds of one step, all of the same step; None where it is not known."""

    step: float
    """As the training loop does it; above 0."""
    synthetic: float
    """The same with the batch already on the devices, always the same one."""
    model: float | None
    """Model FLOPs of a device at its peak."""
    hardware: float | None
    """FLOPs of the compiled program's products on a device at its peak."""
    products: float | None
    """Those products alone, in their shapes."""
    compute: float
    """The devices compute: a typical one, or any where devices share cores."""
    communication: float
    """Collectives beside which nothing computes."""
    callbacks: float
    """The host computes for a device, and no device meanwhile."""
    idle: float
    """Nothing runs."""
    straggler: float = 0.0
    """All wait for one device."""
    shared: bool = False
    """Devices share cores: that one device computes alone shows as computation, not as waits."""
    bubble: float | None = None
    """Share of all time that a pipeline waits, by formula, 0 to 1; None without one."""


@dataclass(frozen=True)
class Row:
    """A part of the step."""

    name: str
    seconds: float
    share: float
    """Of the step, 0 to 1."""


@dataclass(frozen=True)
class Waterfall:
    """The rows, which sum to the step, and what a reader must know of them."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def loss(self) -> Row:
        """The largest row but the model's own."""
        return max((row for row in self.rows if row.name != MODEL), key=lambda row: row.seconds)


def waterfall(m: Measured) -> Waterfall:
    """The rows in order from the peak to the step."""
    made, notes = _Rows(min(m.synthetic, m.step)), []

    def above_zero(difference: float, what: str) -> float:
        if difference < 0:
            notes.append(f"{what} by {-1e3 * difference:.3g} ms: taken for noise")
        return max(difference, 0.0)

    data = above_zero(m.step - m.synthetic, "the step with data was the faster one")
    model = m.hardware if m.model is None else m.model
    made.claim(MODEL, model)
    made.claim(CALLBACKS, m.callbacks)
    again = 0.0
    if model is not None and m.hardware is not None:
        again = above_zero(m.hardware - model, "the program's products take less than the model's")
    made.claim(RECOMPUTATION, again)
    at_peak = (model or 0.0) + again
    products = at_peak
    if m.products is not None:
        small = above_zero(m.products - at_peak, "the products alone were faster than at peak")
        made.claim(KERNELS, small)
        products += small
    # On CPU what a product does in a pool of threads shows as idle: the products come first.
    less = "the devices were seen to compute for less than the products take alone"
    made.claim(COMPUTATION, above_zero(m.compute - products, less))
    made.claim(COMMUNICATION, m.communication)
    made.claim(IDLE, m.idle)
    waits = (COMPUTATION,) if m.shared else ()
    made.move(STRAGGLERS, m.straggler, (*waits, COMMUNICATION, IDLE))
    if m.bubble is not None:
        wanted = m.bubble * min(m.synthetic, m.step)
        found = made.move(BUBBLE, wanted, (IDLE, COMMUNICATION, COMPUTATION, RECOMPUTATION))
        if found < wanted:
            notes.append(
                f"a pipeline bubble of {1e3 * wanted:.3g} ms by formula, of which the step has"
                f" room for {1e3 * found:.3g} ms"
            )
    seconds = made.seconds | {DATA: data}
    seconds[REST] = max(0.0, m.step - fsum(seconds.values()))
    order = [name for name in _ORDER if name in seconds]
    return Waterfall(tuple(Row(n, seconds[n], seconds[n] / m.step) for n in order), tuple(notes))


class _Rows:
    """Seconds by name, out of `left`."""

    def __init__(self, left: float) -> None:
        self.left, self.seconds = left, dict[str, float]()

    def claim(self, name: str, seconds: float | None) -> None:
        """A row of its seconds, or of what is left if that is less."""
        if seconds is not None:
            self.seconds[name] = min(seconds, self.left)
            self.left -= self.seconds[name]

    def move(self, name: str, seconds: float, rows: tuple[str, ...]) -> float:
        """A row out of other rows, and of what is left; what it got."""
        needed = seconds
        for row in rows:
            moved = min(needed, self.seconds.get(row, 0.0))
            if moved:
                self.seconds[row] -= moved
                needed -= moved
        rest = min(needed, self.left)
        self.left -= rest
        self.seconds[name] = seconds - needed + rest
        return self.seconds[name]


_ORDER = (
    MODEL, RECOMPUTATION, KERNELS, COMPUTATION, COMMUNICATION, STRAGGLERS, BUBBLE, CALLBACKS, IDLE,
    DATA, REST,
)  # fmt: skip
