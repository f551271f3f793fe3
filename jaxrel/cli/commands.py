"""What each subcommand does: one thin function each, which returns an exit code."""

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from jaxrel import config_file
from jaxrel.config import Config, show
from jaxrel.exit_codes import ExitCode, FailedError, UsageError


def train(config: Config, make_task: Any = None) -> int:
    """Train in this process, unsupervised, until the run is finished or told to stop."""
    from jaxrel.train.run import train as run

    return run(config) if make_task is None else run(config, make_task)


def data_build(args: Namespace) -> int:
    """Turn files and folders of text into an ArrayRecord corpus."""
    from jaxrel.data.corpus import build

    made = build(args.sources, args.out, tokenizer=args.tokenizer, held_out=args.held_out)
    print(f"{made.path}: {'made' if made.created else 'was there already, and is the same'}")
    for name, split in made.corpus.splits.items():
        print(f"{name}: {split.tokens:,} tokens from {split.files:,} files")
    for reason, count in made.skipped.items():
        print(f"left out: {count:,} {reason}")
    return ExitCode.OK


def checkpoint_list(args: Namespace) -> int:
    """List the checkpoints of a run and say which of them can be restored."""
    directory, local = checkpoint_dirs(args.run)
    from jaxrel.checkpoint.listing import list_checkpoints

    with _readable(directory):
        document = list_checkpoints(directory, local)
    if args.json:
        print(json.dumps(document))
        return ExitCode.OK
    for entry in document["checkpoints"]:
        trust = "trusted" if entry["trusted"] else ""
        size = "" if entry["bytes"] is None else f"{entry['bytes']:,} bytes"
        digest = entry["state_digest"] or "unknown"
        where = f"{entry['tier']:<7}  " if local else ""
        status = f"{where}{entry['status']:<10}"
        line = f"step {entry['step']:>8}  {status}  {digest:<32}  {size}  {trust}"
        print(line.rstrip())
    latest = document["latest_restorable"]
    print("no restorable checkpoint" if latest is None else f"latest restorable: step {latest}")
    return ExitCode.OK


def checkpoint_verify(args: Namespace) -> int:
    """Read the checkpoints of a run back and prove every digest; what is found is marked.

    Needs no model and no accelerator. Exits 0 if all are right, 1 if one is not.
    """
    directory, local = checkpoint_dirs(args.run)
    from jaxrel.checkpoint.verify import verify

    with _readable(directory):
        document = verify(directory, args.step, local)
    if args.json:
        print(json.dumps(document))
    else:
        for row in document["checkpoints"]:
            bad = ", ".join(row["bad_leaves"])
            told = "every digest is right" if row["ok"] else f"damaged: {bad}"
            where = f"{row['tier']:<7}  " if local else ""
            print(f"step {row['step']:>8}  {where}{told}")
    return ExitCode.OK if document["ok"] else 1


def plan_interval(args: Namespace) -> int:
    """How often to save: the interval that loses least, from what a failure and a save cost."""
    from jaxrel.plan import interval
    from jaxrel.plan.quantities import duration

    overlap = None if args.overlap is None else float(args.overlap)
    mtbf, cost = duration(args.mtbf, "mtbf"), duration(args.cost, "cost")
    document = interval.document(mtbf, cost, duration(args.restart, "restart"), overlap)
    print(json.dumps(document, allow_nan=False) if args.json else interval.text(document))
    return ExitCode.OK


def plan_memory(args: Namespace) -> int:
    """What parameters, gradients and optimizer state take, whole and on each device."""
    from jaxrel.plan import memory
    from jaxrel.plan.quantities import count

    document = memory.document(count(args.params, "params"), args.devices, args.gradients)
    print(json.dumps(document) if args.json else memory.table(document))
    return ExitCode.OK


def plan_mfu(args: Namespace) -> int:
    """Utilisation from numbers: FLOPs per token and tokens per second against the peak.

    The FLOPs per token are given, or counted from an architecture by a published convention. What
    cannot be told (unknown device kind, more than 1) is null, with one warning.
    """
    from jaxrel.plan import architecture, mfu, peaks

    exactly_one("flops_per_token", args.flops_per_token, "architecture", args.architecture)
    exactly_one("device_kind", args.device_kind, "peak_flops", args.peak_flops)
    if (args.architecture is None) != (args.convention is None):
        got = show(args.convention) if args.convention else "nothing"
        raise UsageError(f"convention: got {got}: expected it and architecture together")
    if args.peak_flops is None:
        peak = peaks.peak(args.device_kind, args.dtype)
    else:
        peak = peaks.given(args.peak_flops)
    hardware = args.hardware_flops_per_token
    if args.architecture is None:
        count = mfu.given(args.flops_per_token, hardware)
    else:
        count = mfu.counted(architecture.parse(args.architecture), args.convention, hardware)
    document = mfu.document(count, args.tokens_per_second, args.devices, peak)
    print(json.dumps(document, allow_nan=False) if args.json else mfu.text(document))
    if document["mfu"] is None or (count.hardware is not None and document["hfu"] is None):
        print(f"jaxrel: warning: {document['reading']}", file=sys.stderr)
    return ExitCode.OK


def exactly_one(first: str, one: Any, second: str, other: Any) -> None:
    """Refuse two flags that answer the same question, and none."""
    if (one is None) == (other is None):
        got = "nothing" if one is None else f"{second} as well"
        raise UsageError(f"{first}: got {got}: expected either {first} or {second}")


def plan_bubble(args: Namespace) -> int:
    """What a pipeline loses while it fills and drains, from stages and microbatches."""
    from jaxrel.plan import bubble

    document = bubble.document(args.stages, args.microbatches, args.interleave)
    print(json.dumps(document) if args.json else bubble.text(document))
    return ExitCode.OK


def launch(args: Namespace, command: Sequence[str]) -> int:
    """Run a command as a supervised job: watched, and restarted as a whole when it fails."""
    from jaxrel.supervise.launch import Launch
    from jaxrel.supervise.launch import launch as run

    values = {name: value for name, value in vars(args).items() if name not in ("dir", "config")}
    Launch(**values, command=tuple(command), run_dir="." if args.dir is None else args.dir).check()
    run_dir = _own_run_dir(command) if args.dir is None else args.dir
    return run(Launch(**values, command=tuple(command), run_dir=run_dir))


def agent(args: Namespace) -> int:
    """Be the agent of one host of a supervised job, under a scheduler of your own."""
    from jaxrel.supervise.agent import agent as serve

    return serve(args.leader, args.host)


def report(args: Namespace) -> int:
    """Show what happened in a run and where its time went."""
    from jaxrel.ledger.reader import read
    from jaxrel.ledger.summary import summarize

    journal = read(args.run)
    if not journal.records:
        raise UsageError(f"RUN: got {args.run!r}: its ledger is empty: nothing was recorded yet")
    summary = summarize(journal)
    if args.json:
        print(json.dumps(summary.document, allow_nan=False))
        return ExitCode.OK
    from rich.console import Console

    from jaxrel.report.terminal import show as show_report

    show_report(summary, Console(), time.time())
    return ExitCode.OK


def flops(config: Config, args: Namespace, make_task: Any = None) -> int:
    """Count the FLOPs of a step: the model's, the compiled program's, and XLA's own number.

    Compiles the step for the devices that there are and trains nothing.
    """
    from jaxrel.habits.flops import flops as count
    from jaxrel.habits.flops import table

    document = count(config) if make_task is None else count(config, make_task)
    print(json.dumps(document) if args.json else table(document))
    return ExitCode.OK


def diagnose(config: Config, args: Namespace, make_task: Any = None) -> int:
    """Where the time of a step goes: measured, as a waterfall from the peak down to MFU.

    Runs the step on the devices that there are and writes nothing into the run. Names the largest
    loss and what to try.
    """
    from jaxrel.habits.diagnose import Diagnose
    from jaxrel.habits.diagnose import diagnose as run

    asked = Diagnose(
        args.seconds, args.stages, args.microbatches, args.interleave, args.svg, args.json
    )
    return run(config, asked, make_task)


def drill(args: Namespace) -> int:
    """Interrupt and resize a run of your configuration on purpose; does it end in the same bits?

    Exits 0 only if every loss and the last checkpoint agree with an undisturbed run's.
    """
    from jaxrel.habits.drill import Drill
    from jaxrel.habits.drill import drill as run

    return run(
        Drill(args.config, args.kills, args.kinds, args.resize, args.seed, args.dir, args.json)
    )


def demo(args: Namespace) -> int:
    """Train on real text, be killed, hang, shrink, grow, and end in the same bits: see it here."""
    from jaxrel.habits.demo import demo as run

    return run(args.dir)


@contextlib.contextmanager
def _readable(directory: str) -> Iterator[None]:
    """Storage that cannot be read is told in one line."""
    try:
        yield
    except OSError as error:
        why = " ".join(str(error).split())
        raise FailedError(f"{directory} cannot be read: {type(error).__name__}: {why}") from error


def checkpoint_dirs(run: str) -> tuple[str, list[Path]]:
    """Where a run's checkpoints are, and its folders on its hosts' disks, as far as these are here.

    `run` is the directory of a run, or of checkpoints.
    """
    recorded = Path(run, "config.yaml")
    if not recorded.is_file():
        return _checkpoint_dir(run), []
    checkpoint = config_file.load(recorded).checkpoint
    from jaxrel.checkpoint.local_files import run_folders, run_name

    local = run_folders(checkpoint.local_dir, run_name(run)) if checkpoint.local_dir else []
    return checkpoint.dir or str(Path(run, "checkpoints")), local


def _checkpoint_dir(run: str) -> str:
    if "://" in run:
        return run
    if any(Path(run, name).is_dir() for name in ("ledger", "checkpoints")):
        return str(Path(run, "checkpoints"))
    from jaxrel.checkpoint.listing import scan

    if not scan(run):
        raise UsageError(f"RUN: got {run!r}: expected the directory of a run, or of checkpoints")
    return run


def _own_run_dir(command: Sequence[str]) -> str:
    """The run directory that a command trains in, by its flags or its configuration."""
    for word, following in zip(reversed(command), ["", *reversed(command)], strict=False):
        name, equals, value = word.partition("=")
        if name == "--run.dir" and (value or following):
            return value if equals else following
    for before, word in itertools.pairwise(command):
        if before == "train" and Path(word).suffix in (".yaml", ".yml"):
            return config_file.load(word).run.dir
    raise UsageError("--dir: got nothing: expected the run directory; CMD has no --run.dir")


CONFIGURED = {"flops": flops, "diagnose": diagnose}
"""Commands that take a configuration as `train` does, and flags of their own."""

BY_NAME = {
    "data build": data_build,
    "checkpoint list": checkpoint_list,
    "checkpoint verify": checkpoint_verify,
    "plan interval": plan_interval,
    "plan memory": plan_memory,
    "plan mfu": plan_mfu,
    "plan bubble": plan_bubble,
    "report": report,
    "agent": agent,
    "demo": demo,
    "drill": drill,
}
"""All but `train` and `launch`, which take more than their arguments."""
