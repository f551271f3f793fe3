"""The command line's grammar."""

from typing import Any, get_type_hints

from jsonargparse import ArgumentParser, set_parsing_settings

import jaxrel
from jaxrel.cli import commands as do
from jaxrel.config import Config
from jaxrel.plan.architecture import NAMES
from jaxrel.plan.conventions import BY_NAME


def parsers() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """The parser of the whole command line, and those of the commands that take a configuration."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    top = ArgumentParser(
        prog="jaxrel",
        description=jaxrel.__doc__,
        version=jaxrel.__version__,
        exit_on_error=False,
        allow_abbrev=False,
    )
    commands = top.add_subcommands(metavar="COMMAND")
    configured = {"train": _add_configured(commands, "train", do.train)}
    _add_data(commands)
    _add_checkpoint(commands)
    _add_plan(commands)
    reporting = _add(commands, "report", do.report)
    reporting.add_argument("run", metavar="RUN", help="directory of the run")
    _json(reporting)
    _add_supervision(commands)
    demonstration = _add(commands, "demo", do.demo)
    demonstration.add_argument("--dir", metavar="DIR", help="a new or empty folder for the runs")
    _add_drill(commands)
    configured["flops"] = _add_configured(commands, "flops", do.flops)
    _json(configured["flops"])
    configured["diagnose"] = _add_diagnose(commands)
    return top, configured


def _add(commands: Any, name: str, act: Any, **options: Any) -> ArgumentParser:
    """The parser of the subcommand that does `act`, whose docstring is its help."""
    parser = ArgumentParser(description=act.__doc__, **options)
    commands.add_subcommand(name, parser, help=act.__doc__.split("\n")[0])
    return parser


def _group(commands: Any, name: str, what: str, members: str) -> Any:
    """The subcommands below a subcommand."""
    parser = ArgumentParser(description=f"{what}.")
    commands.add_subcommand(name, parser, help=f"{what}: {members}.")
    return parser.add_subcommands(metavar="COMMAND")


def _json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _add_configured(commands: Any, name: str, act: Any) -> ArgumentParser:
    usage = f"jaxrel {name} CONFIG [--section.key VALUE ...]"
    parser = _add(commands, name, act, usage=usage)
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the values below")
    for key, section in get_type_hints(Config).items():
        group = parser.add_argument_group(section.__doc__.rstrip("."))
        group.add_class_arguments(section, nested_key=key, as_group=False)
    return parser


def _add_data(commands: Any) -> None:
    data = _group(commands, "data", "Make corpora", "build")
    flag = _add(data, "build", do.data_build).add_argument
    flag("sources", metavar="SOURCE", nargs="+", help="file or folder of text")
    flag("--out", metavar="DIR", required=True, help="where the corpus goes")
    flag("--tokenizer", metavar="T", default="bytes", help="bytes, or LIBRARY:NAME")
    flag("--held-out", metavar="F", type=float, default=0.05, help="share of the files held out")


def _add_checkpoint(commands: Any) -> None:
    checkpoint = _group(commands, "checkpoint", "Look at checkpoints", "list, verify")
    for name, act in (("list", do.checkpoint_list), ("verify", do.checkpoint_verify)):
        parser = _add(checkpoint, name, act)
        where = "directory of the run, or of its checkpoints"
        parser.add_argument("run", metavar="RUN", help=where)
        if name == "verify":
            parser.add_argument("--step", metavar="N", type=int, help="only this one")
        _json(parser)


def _add_plan(commands: Any) -> None:
    plan = _group(commands, "plan", "Numbers before a run", "interval, memory, mfu, bubble")
    interval = _add(plan, "interval", do.plan_interval)
    flag = interval.add_argument
    flag("--mtbf", metavar="S", required=True, help="mean time between failures: 3h, 45m, 90")
    flag("--cost", metavar="S", required=True, help="what a save costs: seconds, or 2m")
    flag("--restart", metavar="S", default="0", help="from a failure to the next step")
    flag("--overlap", metavar="W", type=float, help="share of the work that goes on in a save")
    _json(interval)
    memory = _add(plan, "memory", do.plan_memory)
    flag = memory.add_argument
    flag("--params", metavar="N", required=True, help="parameters: 70B, 1.5M")
    flag("--devices", metavar="D", type=int, default=1, help="over which all of it is sharded")
    flag("--gradients", metavar="DTYPE", default="float32", help="float32 or bfloat16")
    _json(memory)
    _add_plan_mfu(plan)
    bubble = _add(plan, "bubble", do.plan_bubble)
    flag = bubble.add_argument
    flag("--stages", metavar="P", type=int, required=True, help="of the pipeline")
    flag("--microbatches", metavar="M", type=int, required=True, help="that a step is cut into")
    flag("--interleave", metavar="V", type=int, default=1, help="model chunks of a device")
    _json(bubble)


def _add_plan_mfu(plan: Any) -> None:
    parser = _add(plan, "mfu", do.plan_mfu)
    flag = parser.add_argument
    flag("--flops-per-token", metavar="F", type=float, help="model FLOPs, forward and backward")
    flag(
        "--hardware-flops-per-token", metavar="F", type=float,
        help="those that the hardware does, recomputation included; gives HFU",
    )  # fmt: skip
    flag(
        "--architecture", metavar="NAME=N,...",
        help="in place of --flops-per-token, with what the convention needs, as"
        " layers=118,heads=48,head_dim=256,sequence=2048,parameters=540.35e9; names:"
        f" {', '.join(NAMES)}",
    )  # fmt: skip
    flag("--convention", metavar="NAME", help=f"how to count it: {', '.join(BY_NAME)}")
    flag(
        "--tokens-per-second", metavar="T", type=float, required=True,
        help="of all devices together",
    )  # fmt: skip
    flag("--devices", metavar="N", type=int, required=True, help="JAX devices")
    flag("--device-kind", metavar="K", help='as JAX names it: "TPU v5p", "NVIDIA H100 80GB HBM3"')
    flag("--peak-flops", metavar="X", type=float, help="peak FLOP/s of one device, in its place")
    flag("--dtype", metavar="D", default="bfloat16", help="dtype of the matrix products")
    _json(parser)


def _add_drill(commands: Any) -> None:
    drilling = _add(commands, "drill", do.drill)
    flag = drilling.add_argument
    flag("config", metavar="CONFIG", help="YAML file, as of `jaxrel train`")
    flag("--kills", metavar="N", type=int, default=4, help="interruptions")
    flag(
        "--kinds", metavar="KIND,...", default="kill,term,stop,exception",
        help="of which kinds: kill, term, stop, exception",
    )  # fmt: skip
    flag("--resize", metavar="D,...", default="", help="CPU devices of the attempts in turn: 8,4,2")
    flag("--seed", metavar="S", type=int, default=0, help="of the moments")
    flag("--dir", metavar="DIR", help="a new or empty folder for the runs")
    _json(drilling)


def _add_diagnose(commands: Any) -> ArgumentParser:
    parser = _add_configured(commands, "diagnose", do.diagnose)
    flag = parser.add_argument
    flag("--seconds", metavar="S", type=float, default=20.0, help="to measure, compilation apart")
    flag("--stages", metavar="P", type=int, help="of the pipeline that the step runs, if any")
    flag("--microbatches", metavar="M", type=int, help="that it cuts a step into")
    flag("--interleave", metavar="V", type=int, default=1, help="model chunks of a device")
    flag("--svg", metavar="FILE", help="write the picture there as well")
    _json(parser)
    return parser


def _add_supervision(commands: Any) -> None:
    launching = _add(commands, "launch", do.launch, usage="jaxrel launch [FLAGS] -- CMD [WORD ...]")
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
    flag(
        "--spares", metavar="S", type=int, default=0,
        help="hosts beyond those, each used once it can take the place of a lost or drained one",
    )  # fmt: skip
    flag(
        "--shrink-after", metavar="S", type=float, default=60.0,
        help="seconds that a lost host is waited for before the job goes on with fewer",
    )  # fmt: skip
    flag(
        "--min-hosts", metavar="N", type=int, default=1,
        help="fewest hosts to go on with; how many there are always divides --hosts",
    )  # fmt: skip
    flag(
        "--grow-after", metavar="S", type=float,
        help="end an attempt in order, for one on more hosts, when they have been back so long;"
        " by default the next attempt after a failure uses them",
    )  # fmt: skip
    flag(
        "--drain-after", metavar="K", type=int, default=3,
        help="failures that began on a host, in ten attempts, after which a spare replaces it",
    )  # fmt: skip
    flag(
        "--host-return", metavar="S", type=float, default=0.2,
        help="seconds that a simulated host is off when its agent was killed",
    )  # fmt: skip

    flag = _add(commands, "agent", do.agent).add_argument
    flag("--leader", metavar="HOST:PORT", required=True, help="where it listens")
    flag("--host", metavar="NAME", required=True, help="the host's name in the job")
