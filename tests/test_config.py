import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrel.config import Config, JobConfig, check
from jaxrel.config_file import from_dict, from_yaml, keys, load, to_yaml, with_environment
from jaxrel.exit_codes import UsageError

pytestmark = pytest.mark.core
TINY = Path(__file__).parent.parent / "scripts/configs/tiny.yaml"


def section(**values: dict[str, Any]) -> Config:
    """A configuration with some values of some sections."""
    return from_dict(values)


# Text that YAML might take for something else, and any other.
texts = st.text(max_size=8) | st.sampled_from(
    [
        "a  b " * 40,
        "1e-3",
        "1.5",
        "-.5",
        ".inf",
        "null",
        "~",
        "yes",
        "1:30",
        "0x1",
        "010",
        "2024-01-01",
        "<<",
        "",
    ]
)
configs = st.builds(
    lambda values, rules, axes, skip: from_dict(
        {
            "run": {"dir": values[0], "seed": values[2]},
            "mesh": {"rules": rules, "axes": axes},
            "data": {"corpus": values[1], "skip": skip},
            "optimizer": {"learning_rate": values[3], "clip_norm": values[4]},
            "job": {"detect": values[5], "coordinator": values[1]},
        }
    ),
    st.tuples(
        texts,
        texts | st.none(),
        st.integers(),
        st.floats(allow_nan=False),
        st.integers(-100, 100),
        st.booleans(),
    ),
    st.dictionaries(texts, texts, max_size=3),
    st.dictionaries(texts, st.integers(), max_size=3),
    st.lists(st.integers(), max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(configs)
def test_yaml_round_trip_is_exact(config: Config) -> None:
    again = from_yaml(to_yaml(config))
    assert again == config
    assert type(again.optimizer.clip_norm) is float
    assert type(again.data.skip) is tuple


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", "1.e-3", "+.001"])
def test_floats_are_read_as_people_write_them(text: str) -> None:
    assert from_yaml(f"optimizer: {{learning_rate: {text}}}").optimizer.learning_rate == 1e-3


def test_every_field_has_a_docstring_for_help() -> None:
    import docstring_parser

    for part in dataclasses.fields(Config):
        kind = type(getattr(Config(), part.name))
        documented = {p.arg_name for p in docstring_parser.parse_from_object(kind).params}
        assert documented == {f.name for f in dataclasses.fields(kind)}, kind


def test_defaults_and_the_shipped_file_pass() -> None:
    check(Config())
    tiny = load(TINY)
    check(tiny)
    assert tiny.batch.reduction == "invariant"
    assert tiny.mesh.data == -1
    for devices in (1, 2, 4, 8):  # as the mesh will resolve it
        check(dataclasses.replace(tiny, mesh=dataclasses.replace(tiny.mesh, data=devices)))


def test_the_shipped_file_is_the_one_in_the_package() -> None:
    import jaxrel

    packaged = Path(jaxrel.__file__).parent / "configs/tiny.yaml"
    assert TINY.is_symlink()
    assert TINY.resolve() == packaged.resolve()


def test_keys_are_the_dotted_names() -> None:
    assert "batch.global_size" in keys()
    assert len(keys()) == len(set(keys())) > 40


def test_the_checkpoints_are_inside_the_run_unless_said_otherwise() -> None:
    assert section(run={"dir": "r"}).checkpoint_dir() == "r/checkpoints"
    assert section(checkpoint={"dir": "gs://b/c"}).checkpoint_dir() == "gs://b/c"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "f: is empty: expected sections such as run: and batch:"),
        ("# nothing\n", "f: is empty: expected sections such as run: and batch:"),
        ("- run\n", "f: got ['run']: expected sections such as run: and batch:"),
        ("run\n", "f: got 'run': expected sections such as run: and batch:"),
        ("run: {steps: 1}\nrun: {seed: 1}\n", "f: line 2: the key run is given twice"),
        ("run: {steps: 1, steps: 2}", "f: line 1: the key steps is given twice"),
        ("run: {steps: 1", "f: line 1: expected ',' or '}', but got '<stream end>'"),
        ("a: \0", "f: not YAML: unacceptable character #x0000: special characters are not allowed"),
        ("? [a]\n: 1", "f: not YAML: unhashable type: 'list'"),
        ("run: !!python/name:os.system x", "f: line 1: could not determine a constructor"),
        ("run: 3", "run: got 3: expected a section of dir, seed, steps, print_every"),
        ("run:", "run: got null: expected a section of dir, seed, steps, print_every"),
        ("rum: {steps: 3}", "rum: got {'steps': 3}: unknown key; did you mean run?"),
        ("run: {step: 3}", "run.step: got 3: unknown key; did you mean run.steps?"),
        ("run: {groups: 3}", "run.groups: got 3: unknown key; did you mean batch.groups?"),
        ("steps: 3", "steps: got 3: unknown key; did you mean run.steps?"),
        ("run.steps: 3", "run.steps: got 3: unknown key; nest it, as in run: {steps: ...}"),
        ("job: {xyz: 3}", "job.xyz: got 3: unknown key; expected one of job.coordinator, job.pr"),
        ("1: 3", "1: got 3: unknown key; expected one of run, mesh, job"),
        ("run: {steps: '60'}", "run.steps: got '60': expected a whole number"),
        ("run: {steps: 60.0}", "run.steps: got 60.0: expected a whole number"),
        ("run: {steps: true}", "run.steps: got True: expected a whole number"),
        ("run: {steps: }", "run.steps: got null: expected a whole number"),
        ("run: {steps: {a: 1}}", "run.steps: got {'a': 1}: expected a whole number"),
        ("run: {dir: 5}", "run.dir: got 5: expected text"),
        ("run: {dir: [a]}", "run.dir: got ['a']: expected text"),
        ("model: {dropout: x}", "model.dropout: got 'x': expected a number"),
        ("model: {dropout: true}", "model.dropout: got True: expected a number"),
        ("job: {detect: 1}", "job.detect: got 1: expected true or false"),
        ("job: {process_id: x}", "job.process_id: got 'x': expected a whole number or null"),
        ("batch: {reduction: fst}", "batch.reduction: got 'fst': expected one of fast, invariant"),
        ("batch: {reduction: }", "batch.reduction: got null: expected one of fast, invariant"),
        ("data: {skip: 3}", "data.skip: got 3: expected a list of whole numbers"),
        ("data: {skip: [a]}", "data.skip: got ['a']: expected a list of whole numbers"),
        ("mesh: {axes: [1]}", "mesh.axes: got [1]: expected a mapping from names to whole numbers"),
        ("mesh: {axes: {1: 2}}", "mesh.axes: got {1: 2}: expected a mapping from names to whole"),
        ("mesh: {rules: {a: 2}}", "mesh.rules: got {'a': 2}: expected a mapping from names to nam"),
        (f"optimizer: {{b1: 1{'0' * 400}}}", "optimizer.b1: got 1000"),
    ],
)
def test_what_is_no_configuration_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as refusal:
        from_yaml(text, "f")
    assert str(refusal.value).startswith(complaint)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 200


TRIPLE = {"coordinator": "h:1", "process_id": 0, "num_processes": 2}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"run": {"steps": 0}}, "run.steps: got 0: expected at least 1"),
        ({"run": {"seed": -1}}, "run.seed: got -1: expected a whole number in [0, 2**32)"),
        ({"run": {"seed": 2**32}}, "run.seed: got 4294967296: expected a whole number in [0, 2**"),
        ({"run": {"dir": " "}}, "run.dir: got ' ': expected the path of a directory"),
        ({"run": {"print_every": 0}}, "run.print_every: got 0: expected at least 1"),
        ({"batch": {"global_size": 0}}, "batch.global_size: got 0: expected at least 1"),
        ({"batch": {"sequence": 0}}, "batch.sequence: got 0: expected at least 1"),
        ({"batch": {"groups": 0}}, "batch.groups: got 0: expected at least 1"),
        ({"batch": {"groups": 6}}, "batch.groups: got 6: expected a power of two"),
        (
            {"batch": {"global_size": 12}},
            "batch.global_size: got 12: expected a multiple of batch.groups, which is 8",
        ),
        ({"mesh": {"data": 0}}, "mesh.data: got 0: expected at least 1, or -1 for the devices"),
        ({"mesh": {"fsdp": -2}}, "mesh.fsdp: got -2: expected at least 1, or -1 for the devices"),
        ({"mesh": {"axes": {"expert": 0}}}, "mesh.axes.expert: got 0: expected at least 1, or -1"),
        ({"mesh": {"fsdp": -1}}, "mesh.fsdp: got -1: only one degree may be -1, and mesh.data is"),
        ({"mesh": {"data": 3}}, "mesh.data: got 3: expected a power of two, to divide batch.gro"),
        ({"mesh": {"fsdp": 6}}, "mesh.fsdp: got 6: expected a power of two, to divide batch.gro"),
        (
            {"mesh": {"data": 4, "fsdp": 4}},
            "batch.groups: got 8: expected at least mesh.data x mesh.fsdp, which is 16",
        ),
        ({"mesh": {"fsdp": 16}}, "batch.groups: got 8: expected at least mesh.data x mesh.fsdp"),
        ({"mesh": {"tensor": 3}}, "mesh.tensor: got 3: must divide model.heads, which is 4"),
        ({"mesh": {"tensor": 4}}, "mesh.tensor: got 4: must divide model.kv_heads, which is 2"),
        (
            {"mesh": {"tensor": 2}, "model": {"mlp": 191}},
            "mesh.tensor: got 2: must divide model.mlp, which is 191",
        ),
        (
            {"mesh": {"axes": {"x": 3}, "rules": {"vocabulary": "x"}}},
            "mesh.axes.x: got 3: must divide model.vocabulary, which is 256",
        ),
        ({"mesh": {"axes": {"data": 2}}}, "mesh.axes: got {'data': 2}: data has a key of its own"),
        ({"mesh": {"axes": {"a b": 2}}}, "mesh.axes: got {'a b': 2}: 'a b' cannot name an axis"),
        ({"mesh": {"rules": {"mlp": "t"}}}, "mesh.rules.mlp: got 't': expected one of tensor"),
        ({"mesh": {"rules": {"a.b": "t"}}}, "mesh.rules.a.b: got 't': expected one of tensor"),
        ({"mesh": {"rules": {"mlp": "data"}}}, "mesh.rules.mlp: got 'data': expected one of te"),
        ({"mesh": {"cpu_devices": 0}}, "mesh.cpu_devices: got 0: expected at least 1, or null"),
        ({"model": {"layers": 0}}, "model.layers: got 0: expected at least 1"),
        ({"model": {"kv_heads": 3}}, "model.kv_heads: got 3: must divide model.heads, which is 4"),
        ({"model": {"head_dim": 15}}, "model.head_dim: got 15: expected an even number, for rota"),
        ({"model": {"dropout": 1.0}}, "model.dropout: got 1.0: expected a number in [0, 1)"),
        ({"model": {"dropout": -0.1}}, "model.dropout: got -0.1: expected a number in [0, 1)"),
        ({"model": {"dropout": math.nan}}, "model.dropout: got nan: expected a number in [0, 1)"),
        ({"model": {"rope_theta": 0.0}}, "model.rope_theta: got 0.0: expected a finite number abo"),
        (
            {"optimizer": {"learning_rate": math.inf}},
            "optimizer.learning_rate: got inf: expected a finite number above 0",
        ),
        ({"optimizer": {"b2": 1.0}}, "optimizer.b2: got 1.0: expected a number in [0, 1)"),
        ({"optimizer": {"clip_norm": -1.0}}, "optimizer.clip_norm: got -1.0: expected at least 0"),
        ({"optimizer": {"warmup_steps": -1}}, "optimizer.warmup_steps: got -1: expected at leas"),
        ({"optimizer": {"final_fraction": 2.0}}, "optimizer.final_fraction: got 2.0: expected a"),
        ({"checkpoint": {"interval": 0}}, "checkpoint.interval: got 0: expected at least 1"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep: got 0: expected at least 2"),
        ({"checkpoint": {"dir": ""}}, "checkpoint.dir: got '': expected a path, or null for ins"),
        ({"checkpoint": {"deadline_s": 0.0}}, "checkpoint.deadline_s: got 0.0: expected a finit"),
        (
            {"data": {"corpus": "c", "pipeline": "m:f"}},
            "data.pipeline: got 'm:f': expected null when data.corpus is given",
        ),
        ({"data": {"pipeline": "mf"}}, "data.pipeline: got 'mf': expected module:function"),
        ({"data": {"pipeline": ""}}, "data.pipeline: got '': expected module:function"),
        ({"data": {"corpus": ""}}, "data.corpus: got '': expected a directory, or null for Pyth"),
        ({"data": {"skip": [-1]}}, "data.skip: got (-1,): expected batch positions, from 0"),
        ({"data": {"skip": [2, 2]}}, "data.skip: got (2, 2): expected each position once"),
        (
            {"job": {"coordinator": "h:1"}},
            "job.process_id: got null: job.coordinator, process_id and num_processes go together",
        ),
        ({"job": {"process_id": 0, "num_processes": 1}}, "job.coordinator: got null: job.coord"),
        ({"job": TRIPLE | {"process_id": 2}}, "job.process_id: got 2: expected 0 to 1, below jo"),
        ({"job": TRIPLE | {"process_id": -1}}, "job.process_id: got -1: expected 0 to 1, below"),
        ({"job": TRIPLE | {"num_processes": 0}}, "job.num_processes: got 0: expected at least 1"),
        ({"job": TRIPLE | {"coordinator": "h"}}, "job.coordinator: got 'h': expected host:port"),
        ({"job": TRIPLE | {"coordinator": "h:0"}}, "job.coordinator: got 'h:0': expected host:p"),
        ({"job": TRIPLE | {"coordinator": "http://h:1"}}, "job.coordinator: got 'http://h:1': ex"),
        ({"job": TRIPLE | {"detect": True}}, "job.detect: got True: expected false when job.coor"),
        ({"job": {"join_deadline_s": 0}}, "job.join_deadline_s: got 0.0: expected a finite numbe"),
    ],
)
def test_what_cannot_work_is_refused_by_name(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError) as refusal:
        check(from_dict(values))
    assert str(refusal.value).startswith(complaint)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "values",
    [
        {"mesh": {"data": 2, "fsdp": 4}},
        {"mesh": {"data": 4, "fsdp": -1, "tensor": 2}},
        {"mesh": {"tensor": 3, "rules": {}}},
        {"mesh": {"axes": {"expert": 3}}},
        {"job": TRIPLE},
        {"job": TRIPLE | {"coordinator": "[::1]:80"}},
        {"job": {"detect": True}},
        {"batch": {"groups": 1, "global_size": 3}, "mesh": {"data": 1}},
        {"optimizer": {"clip_norm": 0, "warmup_steps": 0, "weight_decay": 0}},
        {"data": {"pipeline": "my.module:make.it", "skip": [0, 5]}},
    ],
)
def test_what_can_work_is_let_through(values: dict[str, Any]) -> None:
    check(from_dict(values))


def test_the_launcher_fills_what_is_not_given() -> None:
    launcher = {
        "JAXREL_COORDINATOR": "h:1",
        "JAXREL_PROCESS_ID": "3",
        "JAXREL_NUM_PROCESSES": "4",
        "JAXREL_TOKEN": "x",
    }
    filled = with_environment(Config(), launcher)
    assert filled.job == JobConfig("h:1", 3, 4)
    given = section(job={"process_id": 0, "join_deadline_s": 5})
    assert with_environment(given, launcher).job == JobConfig("h:1", 0, 4, join_deadline_s=5.0)
    assert with_environment(given, {}) == given
    with pytest.raises(UsageError, match="^JAXREL_PROCESS_ID: got 'x': expected a whole number$"):
        with_environment(Config(), {"JAXREL_PROCESS_ID": "x"})


def test_the_launchers_number_of_devices_wins() -> None:
    given = section(mesh={"cpu_devices": 8, "data": 2})
    filled = with_environment(given, {"JAXREL_CPU_DEVICES": "4"})
    assert (filled.mesh.cpu_devices, filled.mesh.data) == (4, 2)
    with pytest.raises(UsageError, match="^JAXREL_CPU_DEVICES: got '': expected a whole number$"):
        with_environment(given, {"JAXREL_CPU_DEVICES": ""})


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("absent.yaml", None, "no such file: expected a YAML configuration"),
        (".", None, "cannot be read: Is a directory"),
        ("binary.yaml", b"\xff\xfe\x00\x01", "not a text file: expected a YAML configuration"),
        ("empty.yaml", b"", "is empty: expected sections"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes | None, complaint: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as refusal:
        load(path)
    assert str(refusal.value).startswith(f"{path}: {complaint}")
