"""A configuration as YAML text, strictly: every key known, every value of its type.

`from_yaml(to_yaml(config)) == config` for every configuration. Reading refuses duplicate
and unknown keys, wrong types, and `null` where a value is needed; what the values mean
together is for `jaxrel.config.check`.
"""

import contextlib
import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from jaxrel.config import Config, show
from jaxrel.exit_codes import UsageError

ENVIRONMENT = {
    "JAXREL_COORDINATOR": "coordinator",
    "JAXREL_PROCESS_ID": "process_id",
    "JAXREL_NUM_PROCESSES": "num_processes",
}
"""Environment variables that fill the fields of `job` that are not given."""
CPU_DEVICES = "JAXREL_CPU_DEVICES"
"""Environment variable that replaces mesh.cpu_devices."""

# YAML 1.1 reads 1e-3 as text; YAML 1.2, and people, read a number.
_FLOAT = (
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


class _Loader(yaml.SafeLoader):
    """The safe loader, refusing a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """The safe dumper, quoting what `_Loader` would read as a number."""


_Loader.add_implicit_resolver(*_FLOAT)
_Dumper.add_implicit_resolver(*_FLOAT)


def load(path: str | Path) -> Config:
    """The configuration in a YAML file. Raises UsageError, naming the file or the key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file: expected a YAML configuration") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file: expected a YAML configuration") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    return from_yaml(text, str(path))


def from_yaml(text: str, source: str = "configuration") -> Config:
    """The configuration that `text` describes; keys that are absent take their defaults.

    Raises UsageError, naming the key, or `source` and the line.
    """
    return from_dict(parse(text, source))


def parse(text: str, source: str) -> dict[str, Any]:
    """The mapping that a YAML text holds. Raises UsageError, naming `source` and the line."""
    try:
        document = yaml.load(text, _Loader)  # noqa: S506  it is a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UsageError(f"{source}: {line}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{source}: not YAML: {str(error).splitlines()[0]}") from None
    if document is None:
        raise UsageError(f"{source}: is empty: expected sections such as run: and batch:")
    if not isinstance(document, dict):
        raise UsageError(
            f"{source}: got {show(document)}: expected sections such as run: and batch:"
        )
    return document


def to_yaml(config: Config) -> str:
    """The whole configuration, defaults included, as YAML."""
    plain = dataclasses.asdict(config)
    plain["data"]["skip"] = list(config.data.skip)
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False)


def from_dict(document: Mapping[Any, Any]) -> Config:
    """The configuration with the values of nested mappings. Raises UsageError, naming the key."""
    return _build(Config, document, "")


def with_environment(config: Config, environment: Mapping[str, str] = os.environ) -> Config:
    """Fill the fields of `job` that are not given from the launcher's variables.

    The launcher's number of simulated devices wins over the file's and the command line's.
    """
    found: dict[str, Any] = {}
    for variable, field in ENVIRONMENT.items():
        text = environment.get(variable)
        if text is None or getattr(config.job, field) is not None:
            continue
        found[field] = text if field == "coordinator" else _number(variable, text)
    mesh, cpus = config.mesh, environment.get(CPU_DEVICES)
    if cpus is not None:
        mesh = dataclasses.replace(mesh, cpu_devices=_number(CPU_DEVICES, cpus))
    return dataclasses.replace(config, mesh=mesh, job=dataclasses.replace(config.job, **found))


def _number(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{variable}: got {show(text)}: expected a whole number") from None


def keys() -> list[str]:
    """Every `section.key`, in order."""
    sections = get_type_hints(Config)
    return [f"{s}.{f.name}" for s, kind in sections.items() for f in dataclasses.fields(kind)]


def nearest(key: str) -> str:
    """Advice for an unknown key: the right one, or those to choose from."""
    if key in keys():
        return f"nest it, as in {key.replace('.', ': {')}: ...}}"
    if key in get_type_hints(Config):
        return f"name a key of it, as in --{key}.KEY VALUE"
    section, _, name = key.rpartition(".")
    sections = list(get_type_hints(Config))
    pool = [k for k in keys() if k.startswith(f"{section}.")] if section in sections else sections
    close = [k for k in keys() if k.split(".")[1] == name]  # right name, wrong section
    close = close or difflib.get_close_matches(key, pool, n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(pool)}"


def _build(kind: Any, document: Any, prefix: str) -> Any:
    """A dataclass from a mapping; `prefix` is the dotted key of the mapping and a dot."""
    if not isinstance(document, Mapping):
        names = ", ".join(field.name for field in dataclasses.fields(kind))
        raise UsageError(f"{prefix[:-1]}: got {show(document)}: expected a section of {names}")
    hints, values = get_type_hints(kind), {}
    for name, value in document.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise UsageError(f"{key}: got {show(value)}: unknown key; {nearest(key)}")
        if dataclasses.is_dataclass(hints[name]):
            values[name] = _build(hints[name], value, f"{key}.")
            continue
        try:
            values[name] = _convert(hints[name], value)
        except (TypeError, OverflowError):
            expected = describe(hints[name])
            raise UsageError(f"{key}: got {show(value)}: expected {expected}") from None
    return kind(**values)


def _convert(kind: Any, value: Any) -> Any:
    """`value` as `kind`. Raises TypeError; a whole number will do for a float, nothing else."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):  # Union from Python 3.14 on
        return _first(args, value)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(args[0], item) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {_convert(args[0], k): _convert(args[1], v) for k, v in value.items()}
    if origin is Literal and isinstance(value, str) and value in args:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError
    return value


def _first(kinds: tuple[Any, ...], value: Any) -> Any:
    """`value` as the first of these types that it can be. Raises TypeError."""
    for kind in kinds:
        if kind is NoneType and value is None:
            return None
        with contextlib.suppress(TypeError):
            return _convert(kind, value)
    raise TypeError


def describe(kind: Any) -> str:
    """A type in words, as in "expected a whole number"."""
    origin, args = get_origin(kind), get_args(kind)
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    plain[NoneType] = "null"
    if origin in (UnionType, Union):  # Union from Python 3.14 on
        return " or ".join(map(describe, args))
    if origin is Literal:
        names = ", ".join(args)
        return f"one of {names}" if len(args) > 1 else names
    if origin is tuple:
        return "a list of text" if args[0] is str else "a list of whole numbers"
    if origin is dict:
        return f"a mapping from names to {'names' if args[-1] is str else 'whole numbers'}"
    return plain[kind]


def describe_key(key: str) -> str:
    """What the value of `section.key` must be, in words."""
    kind: Any = Config
    for name in key.split(".", 1):
        kind = get_type_hints(kind).get(name)
    return describe(kind)
