"""The `jaxrel` command: one thin function a subcommand.

Nothing here imports JAX, Grain or Orbax until the subcommand that needs it runs, so that
`--help` and every refusal of a wrong configuration are instant.
"""

import contextlib
import dataclasses
import difflib
import itertools
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

import jaxrel
from jaxrel import config_file
from jaxrel.config import Config, check, show
from jaxrel.exit_codes import ExitCode, JaxrelError, UsageError

_COMMANDS = ("train", "data", "checkpoint", "report", "launch", "agent", "demo")
_FLAGS = (
    "--out", "--tokenizer", "--held-out", "--json", "--backend", "--hosts", "--processes-per-host",
    "--cpu-devices", "--dir", "--max-restarts", "--max-no-progress", "--hang-floor", "--grace",
    "--leader", "--host",
)  # fmt: skip
"""Of all subcommands but `train`."""


def main(argv: Sequence[str] | None = None, make_task: Any = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code.

    `make_task` is what `train` trains, as in `train.run.train`; None is the reference model.
    An error that is meant for people is one line on stderr; any other keeps its traceback.
    """
    try:
        return _dispatch(sys.argv[1:] if argv is None else list(argv), make_task)
    except JaxrelError as error:
        with contextlib.suppress(OSError):  # nobody reads it: the code still counts
            print(f"jaxrel: {_one_line(str(error))}", file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            print("jaxrel: interrupted", file=sys.stderr)
        return 130  # what a shell reports for SIGINT
    except SystemExit as done:  # --help and --version
        return done.code if isinstance(done.code, int) else int(ExitCode.FAILED)
    except Exception:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return int(ExitCode.FAILED)


def command(argv: Sequence[str] | None = None, make_task: Any = None) -> NoReturn:
    """The `jaxrel` command: `main`, then out at once.

    A script that trains a model of its own with `jaxrel train`'s command line calls it with
    ["train", *sys.argv[1:]] and its `make_task`.

    Python itself would first wait for every thread, also for a reader that is stuck or a save
    that is overdue.
    """
    code = main(argv, make_task)
    try:
        print(end="", flush=True)
    except OSError:
        code = code or int(ExitCode.FAILED)  # what was reported did not arrive
    os._exit(code)


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
    directory = checkpoint_dir(args.run)
    from jaxrel.checkpoint.listing import list_checkpoints

    document = list_checkpoints(directory)
    if args.json:
        print(json.dumps(document))
        return ExitCode.OK
    for entry in document["checkpoints"]:
        trust = "trusted" if entry["trusted"] else ""
        size = "" if entry["bytes"] is None else f"{entry['bytes']:,} bytes"
        digest = entry["state_digest"] or "unknown"
        line = f"step {entry['step']:>8}  {entry['status']:<10}  {digest:<32}  {size}  {trust}"
        print(line.rstrip())
    latest = document["latest_restorable"]
    print("no restorable checkpoint" if latest is None else f"latest restorable: step {latest}")
    return ExitCode.OK


def launch(args: Namespace, command: Sequence[str]) -> int:
    """Run a command as a supervised job: watched, and restarted as a whole when it fails."""
    from jaxrel.supervise.launch import Launch
    from jaxrel.supervise.launch import launch as run

    values = {name: value for name, value in vars(args).items() if name not in ("dir", "config")}
    Launch(**values, command=tuple(command), run_dir=args.dir or ".").check()
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

    summary = summarize(read(args.run))
    if args.json:
        print(json.dumps(summary.document, allow_nan=False))
        return ExitCode.OK
    from rich.console import Console

    from jaxrel.report.terminal import show as show_report

    show_report(summary, Console(), time.time())
    return ExitCode.OK


def demo(args: Namespace) -> int:
    """Train on real text, be killed, hang, shrink, grow, and end in the same bits: see it here."""
    from jaxrel.habits.demo import demo as run

    return run(args.dir)


def read_config(parser: ArgumentParser, argv: list[str], path: str) -> Config:
    """The file's values, overridden by the flags in `argv`, then by nothing else.

    The launcher's environment fills in what both leave open. Raises UsageError.
    """
    from_file = dataclasses.asdict(config_file.load(path))
    given = parser.parse_args(argv, namespace=Namespace(from_file)).as_dict()
    config = config_file.from_dict({name: given[name] for name in from_file})
    config = config_file.with_environment(config)
    check(config)
    return config


def checkpoint_dir(run: str) -> str:
    """The checkpoints of a run directory, or `run` itself when it is no run directory."""
    recorded = Path(run, "config.yaml")
    if recorded.is_file():
        config = config_file.load(recorded)
        return config.checkpoint.dir or str(Path(run, "checkpoints"))
    if "://" not in run and not Path(run).is_dir():
        raise UsageError(f"RUN: got {run!r}: expected the directory of a run")
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


def _dispatch(argv: list[str], make_task: Any) -> int:
    """Parse `argv` and call the subcommand that it names."""
    parser, training = _parsers()
    command: list[str] = []
    if argv[:1] == ["launch"] and "--" in argv:  # what follows is another program's
        argv, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    try:
        args = parser.parse_args(argv)
        if args.subcommand == "train":
            return train(read_config(training, argv[1:], args.train.config), make_task)
    except ArgumentError as error:
        raise UsageError(_explain(_one_line(str(error)), argv)) from None
    if args.subcommand == "report":
        return report(args.report)
    if args.subcommand == "launch":
        return launch(args.launch, command)
    if args.subcommand == "agent":
        return agent(args.agent)
    if args.subcommand == "demo":
        return demo(args.demo)
    group = args[args.subcommand]
    commands = {"data build": data_build, "checkpoint list": checkpoint_list}
    return commands[f"{args.subcommand} {group.subcommand}"](group[group.subcommand])


def _parsers() -> tuple[ArgumentParser, ArgumentParser]:
    """The parser of the whole command line, and the one of `train` alone."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    top = ArgumentParser(
        prog="jaxrel",
        description=jaxrel.__doc__,
        version=jaxrel.__version__,
        exit_on_error=False,
        allow_abbrev=False,
    )
    commands = top.add_subcommands(metavar="COMMAND")

    training = ArgumentParser(
        description=train.__doc__, usage="jaxrel train CONFIG [--section.key VALUE ...]"
    )
    training.add_argument("config", metavar="CONFIG", help="YAML file of the values below")
    for name, section in get_type_hints(Config).items():
        group = training.add_argument_group(section.__doc__.rstrip("."))
        group.add_class_arguments(section, nested_key=name, as_group=False)
    commands.add_subcommand("train", training, help=train.__doc__)

    data = ArgumentParser(description="Make corpora.")
    commands.add_subcommand("data", data, help="Make corpora: build.")
    build = ArgumentParser(description=data_build.__doc__)
    build.add_argument("sources", metavar="SOURCE", nargs="+", help="file or folder of text")
    build.add_argument("--out", metavar="DIR", required=True, help="where the corpus goes")
    build.add_argument("--tokenizer", metavar="T", default="bytes", help="bytes, or LIBRARY:NAME")
    build.add_argument(
        "--held-out", metavar="F", type=float, default=0.05, help="share of the files held out"
    )
    data.add_subcommands(metavar="COMMAND").add_subcommand("build", build, help=data_build.__doc__)

    checkpoint = ArgumentParser(description="Look at checkpoints.")
    commands.add_subcommand("checkpoint", checkpoint, help="Look at checkpoints: list.")
    listing = ArgumentParser(description=checkpoint_list.__doc__)
    listing.add_argument("run", metavar="RUN", help="directory of the run, or of its checkpoints")
    listing.add_argument("--json", action="store_true", help="one JSON document")
    checkpoint.add_subcommands(metavar="COMMAND").add_subcommand(
        "list", listing, help=checkpoint_list.__doc__
    )

    reporting = ArgumentParser(description=report.__doc__)
    reporting.add_argument("run", metavar="RUN", help="directory of the run")
    reporting.add_argument("--json", action="store_true", help="one JSON document")
    commands.add_subcommand("report", reporting, help=report.__doc__)
    _add_supervision(commands)
    demonstration = ArgumentParser(description=demo.__doc__)
    demonstration.add_argument("--dir", metavar="DIR", help="a new or empty folder for the runs")
    commands.add_subcommand("demo", demonstration, help=demo.__doc__)
    return top, training


def _add_supervision(commands: Any) -> None:
    """The parsers of `launch` and `agent`."""
    launching = ArgumentParser(
        description=launch.__doc__, usage="jaxrel launch [FLAGS] -- CMD [WORD ...]"
    )
    flag = launching.add_argument
    flag("--backend", metavar="NAME", default="local", help="where: local, this machine")
    flag("--hosts", metavar="N", type=int, default=1, help="simulated hosts: host0, host1, ...")
    flag("--processes-per-host", metavar="P", type=int, default=1, help="processes on each")
    flag("--cpu-devices", metavar="M", type=int, help="CPU devices that each process simulates")
    flag("--dir", metavar="RUN", help="the run's directory; by default the command's --run.dir")
    flag("--max-restarts", metavar="K", type=int, default=10, help="restarts after failures")
    flag(
        "--max-no-progress", metavar="K", type=int, default=3,
        help="attempts running without a new step after which the job ends",
    )  # fmt: skip
    flag(
        "--hang-floor", metavar="S", type=float, default=60.0,
        help="seconds that a step may always take; every other deadline is a multiple",
    )  # fmt: skip
    flag("--grace", metavar="S", type=float, default=60.0, help="seconds from SIGTERM to SIGKILL")
    commands.add_subcommand("launch", launching, help=launch.__doc__)

    serving = ArgumentParser(description=agent.__doc__)
    serving.add_argument("--leader", metavar="HOST:PORT", required=True, help="where it listens")
    serving.add_argument("--host", metavar="NAME", required=True, help="the host's name in the job")
    commands.add_subcommand("agent", serving, help=agent.__doc__)


def _explain(message: str, argv: list[str]) -> str:
    """A parser's complaint as one line, `key: got VALUE: what would be right`."""
    if found := re.match(r'Parser key "([\w.]+)":', message):
        key = found[1]
        return f"{key}: got {show(_typed(key, argv))}: expected {_expected(key, 'a number')}"
    if found := re.match(r"unrecognized arguments: (\S+?)(?:[= ](\S+).*)?$", message):
        return _unknown_argument(found[1], found[2], argv[0])
    if found := re.match(
        r"argument COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)", message
    ):
        names = re.findall(r"[\w-]+", found[2])
        close = difflib.get_close_matches(found[1], names, n=1)
        advice = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(names)}"
        return f"{found[1]}: unknown command; {advice}"
    if found := re.match(r'expected "(.*?)\.?subcommand" to be one of {(.*)},', message):
        names = found[2].replace(",", ", ") if found[1] else ", ".join(_COMMANDS)  # cut short there
        return f"{found[1] or 'command'}: got nothing: expected one of {names}"
    if found := re.match(r"argument --([\w.-]+): expected (.*)", message):
        return f"{found[1]}: got nothing: expected {_expected(found[1], found[2])}"
    if found := re.match(r"the following arguments are required: (?:\S+\.)?(\w+)", message):
        return f"{found[1]}: got nothing: it is required; see --help"
    return message


def _typed(key: str, argv: list[str]) -> str:
    """What was typed for a key; the parser's own message shows what became of it."""
    for flag, following in zip(reversed(argv), ["", *reversed(argv)], strict=False):
        name, equals, value = flag.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if name == key or name.startswith(f"{key}."):
            return value if equals else following
    return ""


def _expected(key: str, otherwise: str) -> str:
    """What the value of a configuration key must be; `otherwise` for any other argument."""
    known = key in config_file.keys()  # noqa: SIM118  not a dict
    return config_file.describe_key(key) if known else otherwise


def _unknown_argument(name: str, value: str | None, command: str) -> str:
    """The line for a flag that does not exist, or an argument too many."""
    if not name.startswith("--"):
        if command == "train" and name in config_file.keys():  # noqa: SIM118  not a dict
            return f"{name}: it is a key, and wants two dashes: --{name} {value or 'VALUE'}"
        return f"{name}: one argument too many; see --help"
    got = "nothing" if value is None else show(value)
    if command == "train":
        return f"{name[2:]}: got {got}: unknown key; {config_file.nearest(name[2:])}"
    close = difflib.get_close_matches(name, _FLAGS, n=1)
    return (
        f"{name}: got {got}: unknown flag; {f'did you mean {close[0]}?' if close else 'see --help'}"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    command()
