"""The picture of `jaxrel diagnose`: from the peak down to the step, for a terminal or a file."""

import io
import re
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Column, Table

from jaxrel.plan.waterfall import MODEL

_WIDTH = 100
"""Columns of the picture in a file."""


def show(document: dict[str, Any], console: Console) -> None:
    """Print the document of `jaxrel diagnose`."""
    peak = f"{document['peak_flops']:,.0f} FLOP/s a device, {document['peak_source']}"
    console.print(f"peak     {peak}", markup=False)
    for name in ("mfu", "hfu"):
        value = document[name]
        shown = "unknown" if value is None else f"{value:.2%}"
        console.print(f"{name.upper():8} {shown}", markup=False)
    console.print(f"reading  {document['reading']}", markup=False)
    console.print()
    console.print(_picture(document))
    console.print()
    console.print(document["verdict"], markup=False)
    console.print(document["advice"], markup=False)
    console.print()
    for note in document["notes"]:
        console.print(f"- {note}", markup=False)
    console.print(document["definition"], markup=False)


def _picture(document: dict[str, Any]) -> Table:
    """A bar a row, each beginning where the one before it ends."""
    table = Table(
        "", Column("ms", justify="right"), Column("share", justify="right"), Column("", ratio=1),
        box=None, pad_edge=False, expand=True, header_style="bold",
    )  # fmt: skip
    begin = 0.0
    for row in document["waterfall"]:
        end = begin + row["share"]
        color = "green" if row["name"] == MODEL else "red"
        bar = Bar(1.0, begin, end, color=color)
        table.add_row(row["name"], f"{1e3 * row['seconds']:,.2f}", f"{row['share']:.1%}", bar)
        begin = end
    total = 1e3 * sum(row["seconds"] for row in document["waterfall"])
    table.add_row("step", f"{total:,.2f}", "100.0%", "", style="bold")
    return table


def svg(document: dict[str, Any]) -> str:
    """The same as an SVG image, which loads nothing from elsewhere."""
    console = Console(record=True, file=io.StringIO(), width=_WIDTH, highlight=False)
    show(document, console)
    image = console.export_svg(title="jaxrel diagnose")
    return re.sub(r"@font-face \{.*?\}\s*", "", image, flags=re.DOTALL)
