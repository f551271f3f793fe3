"""A parser's complaint as one line that a person understands."""

import difflib
import re

from jaxrel import config_file
from jaxrel.config import show

COMMANDS = (
    "train", "data", "checkpoint", "plan", "report", "launch", "agent", "demo", "drill", "flops",
    "diagnose",
)  # fmt: skip
_FLAGS = (
    "--out", "--tokenizer", "--held-out", "--json", "--backend", "--hosts", "--processes-per-host",
    "--cpu-devices", "--dir", "--max-restarts", "--max-no-progress", "--hang-floor", "--grace",
    "--leader", "--host", "--step", "--mtbf", "--cost", "--restart", "--overlap", "--params",
    "--devices", "--gradients", "--flops-per-token", "--hardware-flops-per-token",
    "--architecture", "--convention", "--tokens-per-second", "--device-kind", "--peak-flops",
    "--dtype", "--stages", "--microbatches", "--interleave", "--kills",
    "--kinds", "--resize", "--seed", "--seconds", "--svg",
)  # fmt: skip
"""Of all subcommands but `train`."""


def explain(message: str, argv: list[str]) -> str:
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
        names = found[2].replace(",", ", ") if found[1] else ", ".join(COMMANDS)  # cut short there
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


def one_line(text: str) -> str:
    """`text` without its line breaks."""
    return " ".join(text.split())
