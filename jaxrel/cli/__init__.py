"""The `jaxrel` command: one thin function a subcommand.

Nothing here imports JAX, Grain or Orbax until the subcommand that needs it runs, so that
`--help` and every refusal of a wrong configuration are instant.
"""

import contextlib
import dataclasses
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from jaxrel import config_file
from jaxrel.cli import commands
from jaxrel.cli.explain import explain, one_line
from jaxrel.cli.parsers import parsers
from jaxrel.config import Config, check
from jaxrel.exit_codes import ExitCode, JaxrelError, UsageError


def main(argv: Sequence[str] | None = None, make_task: Any = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code.

    `make_task` is what `train` trains, as in `train.run.train`; None is the reference model.
    An error that is meant for people is one line on stderr; any other keeps its traceback.
    """
    try:
        return _dispatch(sys.argv[1:] if argv is None else list(argv), make_task)
    except JaxrelError as error:
        with contextlib.suppress(OSError):  # nobody reads it: the code still counts
            print(f"jaxrel: {one_line(str(error))}", file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            print("jaxrel: interrupted", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    except SystemExit as done:  # --help and --version
        return done.code if isinstance(done.code, int) else int(ExitCode.FAILED)
    except Exception as error:
        with contextlib.suppress(OSError):
            if isinstance(error, BrokenPipeError):
                print("jaxrel: whoever reads the output has gone", file=sys.stderr)
            elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
                print(f"jaxrel: cannot write: {error.strerror}", file=sys.stderr)
            else:
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


def _dispatch(argv: list[str], make_task: Any) -> int:
    """Parse `argv` and call the subcommand that it names."""
    parser, configured = parsers()
    command: list[str] = []
    if argv[:1] == ["launch"] and "--" in argv:  # what follows is another program's
        argv, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    try:
        args = parser.parse_args(argv)
        if (name := args.subcommand) in configured:
            group = args[name]
            config = read_config(configured[name], argv[1:], group.config)
            if name == "train":
                return commands.train(config, make_task)
            return commands.CONFIGURED[name](config, group, make_task)
    except ArgumentError as error:
        raise UsageError(explain(one_line(str(error)), argv)) from None
    if args.subcommand == "launch":
        return commands.launch(args.launch, command)
    path, group = args.subcommand, args[args.subcommand]
    while "subcommand" in group:
        path, group = f"{path} {group.subcommand}", group[group.subcommand]
    return commands.BY_NAME[path](group)
