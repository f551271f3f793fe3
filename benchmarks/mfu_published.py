"""Published utilisation beside what its own architecture and throughput give, and beside ours.

    python -m benchmarks.mfu_published
    python -m benchmarks.mfu_published --model MPT-7b --convention llm_foundry
    python -m benchmarks.mfu_published --ours benchmarks/results/NAME.json

Every published number is computed again from its row of tests/plan/mfu_rows.csv: architecture,
convention, tokens per second, devices and peak. Ours, from files of `benchmarks.mfu`, are computed
by the same conventions, so that a row may be read beside another of the same one.
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import mfu as benchmark
from benchmarks.step_overhead import about_this_run
from jaxrel.config import show
from jaxrel.exit_codes import UsageError
from jaxrel.plan import conventions, mfu, peaks
from jaxrel.plan.architecture import Architecture, parse

ROWS = Path(__file__).parents[1] / "tests/plan/mfu_rows.csv"
WELL_KNOWN = (
    # source, model, devices, convention
    ("PaLM", "PaLM 540B", 6144, "palm_6n"),
    ("PaLM", "PaLM 540B", 6144, "palm_6n_attention"),
    ("PaLM", "MT-NLG 530B", 2240, "palm_6n_attention"),
    ("Korthikanti", "175B", 64, "megatron"),
    ("Korthikanti", "175B", 64, "korthikanti_selective_hfu"),
    ("Korthikanti", "530B", 280, "megatron"),
    ("Korthikanti", "1T", 512, "megatron"),
    ("MegaScale", "Megatron-LM", 12288, "megatron"),
    ("MegaScale", "MegaScale", 256, "megatron_causal"),
    ("MegaScale", "MegaScale", 8192, "megatron_causal"),
    ("torchtitan", "Llama3.1 8B", 8, "torchtitan"),
    ("llm-foundry", "MPT-70b", 64, "llm_foundry"),
    ("llm-foundry", "MPT-7b", 8, "llm_foundry"),
)
"""Rows shown by default; of several that fit, the first."""
FOR_OURS = (
    "palm_6n",
    "palm_6n_attention",
    "torchtitan",
    "llm_foundry",
    "maxtext",
    "maxtext_causal",
)
"""Conventions that fit any shape of a dense decoder; Megatron's are for one that is not ours."""
_ARCHITECTURE = (
    "layers", "hidden", "heads", "head_dim", "sequence", "vocabulary", "parameters",
)  # fmt: skip


def published(model: str | None = None, convention: str | None = None) -> list[dict[str, Any]]:
    """The rows whose model and convention fit, or the well-known ones; recomputed.

    Only rows with all that it takes to compute them. Raises UsageError when none fits.
    """
    with ROWS.open(encoding="utf-8") as file:
        every = [row for row in csv.DictReader(file) if row["role"] == "oracle"]
    if model is None and convention is None:
        chosen = [next(row for row in every if _is(row, *known)) for known in WELL_KNOWN]
    else:
        named = (model or "").casefold()
        chosen = [r for r in every if named in r["model"].casefold()]
        chosen = [r for r in chosen if convention in (None, r["convention"])]
    if not chosen:
        raise UsageError(
            f"model: got {show(model)}, with convention {show(convention)}: expected those of a row"
            f" of {ROWS.name}"
        )
    return [_recomputed(row) for row in chosen]


def _is(row: dict[str, str], source: str, model: str, devices: int, convention: str) -> bool:
    return (
        row["source"].startswith(source)
        and (row["model"].startswith(model) or row["model"].endswith(model))
        and int(row["chips"]) == devices
        and row["convention"] == convention
    )


def _recomputed(row: dict[str, str]) -> dict[str, Any]:
    given = ",".join(f"{name}={row[name]}" for name in _ARCHITECTURE if row[name])
    count = mfu.counted(parse(given), row["convention"])
    peak = peaks.given(float(row["peak_flops"]))
    made = mfu.document(count, float(row["tokens_per_s"]), int(row["chips"]), peak)
    share = made[row["kind"].lower()]
    return {
        "name": row["model"],
        "source": row["source"],
        "hardware": row["hardware"],
        "devices": int(row["chips"]),
        "kind": row["kind"],
        "convention": row["convention"],
        "published": float(row["published_pct"]) / 100,
        "recomputed": share,
    }


def ours(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each configuration of a result of `benchmarks.mfu`, by every convention that fits it.

    Beside `maxtext`, which counts what the program does, stands what the benchmark itself counted.
    """
    rows: list[dict[str, Any]] = []
    for row in result["rows"]:
        architecture, mesh = Architecture(**row["architecture"]), row["mesh"]
        for name in FOR_OURS:
            flops = conventions.flops_per_token(architecture, name)
            rows.append(
                {
                    "name": f"jaxrel {row['size']}, {mesh['data']}x{mesh['fsdp']}",
                    "source": f"benchmarks.mfu, {result['date']}, peak {row['peak_source']}",
                    "hardware": result["device_kind"],
                    "devices": row["devices"],
                    "kind": "MFU",
                    "convention": name,
                    "published": row["mfu"] if name == benchmark.CONVENTIONS[0] else None,
                    "recomputed": mfu.mfu(
                        flops, row["tokens_per_second"], row["devices"], row["peak_flops"]
                    ),
                }
            )
    return rows


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"ours: got {str(path)!r}: expected JSON of benchmarks.mfu") from error


def table(rows: Sequence[dict[str, Any]], stated: str = "published") -> Table:
    """A line for each row; `stated` says by whom. Differences are in percentage points."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("source", "model", "hardware", "devices", "", "convention"):
        made.add_column(name, justify="right" if name == "devices" else "left")
    for name in (stated, "recomputed", "difference"):
        made.add_column(name, justify="right")
    for row in rows:
        found = difference(row)
        made.add_row(
            row["source"].split()[0].rstrip(","),
            row["name"],
            row["hardware"],
            f"{row['devices']:,}",
            row["kind"],
            row["convention"],
            _percent(row["published"]),
            _percent(row["recomputed"]),
            "" if found is None else f"{found:+.2f}",
        )
    return made


def difference(row: dict[str, Any]) -> float | None:
    """Percentage points that the recomputed number is above the published one."""
    if row["published"] is None or row["recomputed"] is None:
        return None
    return 100 * (row["recomputed"] - row["published"])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """The command line; returns what it writes."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks.mfu_published")
    flags.add_argument("--model", help="part of the name of a published model")
    flags.add_argument("--convention", choices=sorted(conventions.BY_NAME))
    flags.add_argument("--ours", nargs="+", type=Path, default=[], help="JSON of benchmarks.mfu")
    flags.add_argument("--quick", action="store_true", help="ours by a smoke of benchmarks.mfu")
    flags.add_argument("--out", type=Path, help="JSON file for the result")
    given = flags.parse_args(args)
    about = about_this_run([*flags.prog.split(), *(sys.argv[1:] if args is None else args)])
    try:
        rows = published(given.model, given.convention)
        results = [_read(path) for path in given.ours]
    except UsageError as error:
        flags.exit(error.code, f"{flags.prog}: {error}\n")
    if given.quick:
        results.append(benchmark.main(["--quick"]))
    mine = [row for result in results for row in ours(result)]
    console = Console(markup=False, highlight=False)
    console.width = max(console.width, 150)
    console.print(table(rows))
    found = [abs(d) for row in rows if (d := difference(row)) is not None]
    console.print(f"{len(rows)} rows, median difference {np.median(found):.3f} percentage points")
    if mine:
        console.print()
        console.print(table(mine, "counted"))
    for name in dict.fromkeys(row["convention"] for row in [*rows, *mine]):
        console.print(f"{name}  {conventions.find(name).definition}", soft_wrap=True)
    result = about | {"published": rows, "ours": mine}
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
