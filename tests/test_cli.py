import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jaxrel
from jaxrel.checkpoint.local_files import keep_name
from jaxrel.cli import main
from jaxrel.config import Config
from jaxrel.config_file import from_yaml
from jaxrel.exit_codes import DataRefusedError, FailedError, PreemptedError

pytestmark = pytest.mark.core
TINY = str(Path(__file__).parent.parent / "scripts/configs/tiny.yaml")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that training was started with; training itself is left out."""
    configs: list[Config] = []

    def train(config: Config) -> int:
        configs.append(config)
        return 0

    monkeypatch.setitem(sys.modules, "jaxrel.train.run", SimpleNamespace(train=train))
    for name in [name for name in os.environ if name.startswith("JAXREL_")]:
        monkeypatch.delenv(name)
    return configs


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make training raise."""

    def install(error: BaseException) -> None:
        def train(config: Config) -> int:
            raise error

        monkeypatch.setitem(sys.modules, "jaxrel.train.run", SimpleNamespace(train=train))

    return install


def test_the_file_then_the_flags_then_the_environment(
    trained: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run: {steps: 7, seed: 3}\nmesh: {rules: {mlp: tensor}, axes: {expert: 2}}\n")
    monkeypatch.setenv("JAXREL_COORDINATOR", "h:1")
    monkeypatch.setenv("JAXREL_PROCESS_ID", "3")
    monkeypatch.setenv("JAXREL_NUM_PROCESSES", "4")
    flags = "--run.seed 5 --optimizer.learning_rate 1e-3 --data.skip [4,6] --mesh.data=-1"
    flags += " --mesh.axes.expert 3 --job.process_id 1 --checkpoint.dir null --run.dir 12"
    assert main(["train", str(path), *flags.split()]) == 0
    (config,) = trained
    assert config == from_yaml(
        """
        run: {steps: 7, seed: 5, dir: "12"}
        mesh: {rules: {mlp: tensor}, axes: {expert: 3}}
        optimizer: {learning_rate: 0.001}
        data: {skip: [4, 6]}
        job: {coordinator: "h:1", process_id: 1, num_processes: 4}
        """
    )
    assert isinstance(config.data.skip, tuple)


def test_the_documented_command_is_complete(trained: list[Config]) -> None:
    command = f"train {TINY} --run.dir R --mesh.cpu_devices 8 --mesh.data 8"
    assert main(command.split()) == 0
    assert (trained[0].run.dir, trained[0].mesh.cpu_devices, trained[0].mesh.data) == ("R", 8, 8)


def test_flags_may_stand_before_the_file(trained: list[Config]) -> None:
    assert main(["train", "--run.steps", "9", TINY]) == 0
    assert trained[0].run.steps == 9


WRONG = [
    ("run: {steps: 0}", "", "run.steps: got 0: expected at least 1"),
    ("run: {step: 9}", "", "run.step: got 9: unknown key; did you mean run.steps?"),
    ("runn: {steps: 9}", "", "runn: got {'steps': 9}: unknown key; did you mean run?"),
    ("run: {steps: many}", "", "run.steps: got 'many': expected a whole number"),
    ("run:\n  steps: 1\n  steps: 2\n", "", "c.yaml: line 3: the key steps is given twice"),
    ("- run\n", "", "c.yaml: got ['run']: expected sections such as run: and batch:"),
    ("", "", "c.yaml: is empty: expected sections such as run: and batch:"),
    ("\udcff\udcfe", "", "c.yaml: not a text file: expected a YAML configuration"),
    ("run: {", "", "c.yaml: line 1: expected the node content, but found '<stream end>'"),
    (None, "", "c.yaml: no such file: expected a YAML configuration"),
    (
        "batch: {global_size: 30}",
        "",
        "batch.global_size: got 30: expected a multiple of batch.groups, which is 8",
    ),
    ("run: {}", "--batch.groups 6", "batch.groups: got 6: expected a power of two"),
    (
        "batch: {reduction: invariant}",
        "--mesh.data 3",
        "mesh.data: got 3: expected a power of two, to divide batch.groups (8)",
    ),
    (
        "batch: {reduction: invariant}",
        "--mesh.data 4 --mesh.fsdp 4",
        "batch.groups: got 8: expected at least mesh.data x mesh.fsdp, which is 16",
    ),
    ("mesh: {fsdp: -1}", "", "mesh.fsdp: got -1: only one degree may be -1, and mesh.data is"),
    ("mesh: {tensor: 3}", "", "mesh.tensor: got 3: must divide model.heads, which is 4"),
    ("model: {heads: 5}", "", "model.kv_heads: got 2: must divide model.heads, which is 5"),
    ("model: {dropout: 1}", "", "model.dropout: got 1.0: expected a number in [0, 1)"),
    (
        "data: {corpus: c}",
        "--data.pipeline m:f",
        "data.pipeline: got 'm:f': expected null when data.corpus is given",
    ),
    (
        "run: {}",
        "--job.coordinator h:1",
        "job.process_id: got null: job.coordinator, process_id and num_processes go together",
    ),
    ("run: {}", "--run.steps many", "run.steps: got 'many': expected a whole number"),
    ("run: {}", "--run.steps 1.5", "run.steps: got '1.5': expected a whole number"),
    ("run: {}", "--run.steps=true", "run.steps: got 'true': expected a whole number"),
    ("run: {}", "--run.steps", "run.steps: got nothing: expected a whole number"),
    ("run: {}", "--run.steps null", "run.steps: got 'null': expected a whole number"),
    ("run: {}", "--run.step 3", "run.step: got '3': unknown key; did you mean run.steps?"),
    ("run: {}", "--steps=3", "steps: got '3': unknown key; did you mean run.steps?"),
    (
        "run: {}",
        "--mesh 8",
        "mesh: got '8': unknown key; name a key of it, as in --mesh.KEY VALUE",
    ),
    (
        "run: {}",
        "--batch.reduction exact",
        "batch.reduction: got 'exact': expected one of fast, invariant",
    ),
    ("run: {}", "--job.detect maybe", "job.detect: got 'maybe': expected true or false"),
    ("run: {}", "another.yaml", "another.yaml: one argument too many; see --help"),
    (
        "run: {}",
        "run.steps=5",
        "run.steps: it is a key, and wants two dashes: --run.steps 5",
    ),
]


@pytest.mark.parametrize(("text", "flags", "complaint"), WRONG)
def test_a_wrong_configuration_is_one_line_and_leaves_nothing(
    text: str | None,
    flags: str,
    complaint: str,
    trained: list[Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("c.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
    before = list(tmp_path.iterdir())
    assert main(["train", "c.yaml", *flags.split()]) == 64
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"jaxrel: {complaint}\n")
    assert trained == []
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (
            "",
            "command: got nothing: expected one of train, data, checkpoint, plan, report,"
            " launch, agent, demo, drill, flops, diagnose",
        ),
        ("trian", "trian: unknown command; did you mean train?"),
        (
            "xyz",
            "xyz: unknown command; expected one of train, data, checkpoint, plan, report,"
            " launch, agent, demo, drill, flops, diagnose",
        ),
        ("train", "config: got nothing: it is required; see --help"),
        ("data", "data: got nothing: expected one of build"),
        ("data bulid", "bulid: unknown command; did you mean build?"),
        ("data build", "sources: got nothing: it is required; see --help"),
        ("data build x", "out: got nothing: it is required; see --help"),
        ("data build x --out", "out: got nothing: expected one argument"),
        ("data build x --ot y", "--ot: got 'y': unknown flag; did you mean --out?"),
        ("data build x --xyzzy", "--xyzzy: got nothing: unknown flag; see --help"),
        ("data build x --out y --held-out z", "held_out: got 'z': expected a number"),
        ("checkpoint list", "run: got nothing: it is required; see --help"),
        (
            "checkpoint list absent",
            "RUN: got 'absent': expected the directory of a run, or of checkpoints",
        ),
    ],
)
def test_a_wrong_command_is_one_line(
    argv: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv.split()) == 64
    assert capsys.readouterr().err == f"jaxrel: {complaint}\n"


@pytest.mark.parametrize("flags", [["--run.steps", "0"], ["--run.step", "1"]])
def test_the_real_command_refuses_in_one_line(flags: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxrel.cli", "train", TINY, *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(jaxrel.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 64
    assert done.stdout == ""
    assert done.stderr.startswith("jaxrel: run.step")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_errors_for_people_end_with_their_code(
    raising: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code in [
        (DataRefusedError("a\n b"), 65),
        (FailedError("a b"), 70),
        (PreemptedError("a b"), 75),
    ]:
        raising(error)
        assert main(["train", TINY]) == code
        assert capsys.readouterr().err == "jaxrel: a b\n"


def test_other_errors_keep_their_traceback(
    raising: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    raising(KeyError("weights"))
    assert main(["train", TINY]) == 70
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("KeyError: 'weights'\n")
    raising(KeyboardInterrupt())
    assert main(["train", TINY]) == 130
    assert capsys.readouterr().err == "jaxrel: interrupted\n"


def test_the_code_of_training_is_the_code_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxrel.train.run", SimpleNamespace(train=lambda config: 75))
    assert main(["train", TINY]) == 75


def test_help_teaches_every_key_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--batch.groups GROUPS Equal parts of the global batch, fixed for" in text
    assert "a power of two. (type: int, default: 8)" in text
    assert "--batch.reduction {fast,invariant}" in text
    for argv in (["--help"], ["data", "--help"], ["data", "build", "--help"]):
        assert main(argv) == 0
        assert "usage: jaxrel" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxrel {jaxrel.__version__}\n"


def test_data_build_makes_a_corpus_and_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 100)
    (tmp_path / "empty.txt").touch()
    out = tmp_path / "corpus"
    argv = ["data", "build", str(tmp_path), "--out", str(out), "--held-out", "0.5"]
    assert main(argv) == 0
    assert capsys.readouterr().out == (
        f"{out}: made\n"
        "train: 101 tokens from 1 files\n"
        "held_out: 101 tokens from 1 files\n"
        "left out: 1 empty\n"
    )
    assert main(argv) == 0
    assert "was there already" in capsys.readouterr().out
    assert main([*argv, "--tokenizer", "nonsense"]) == 64


def listing(latest: int | None) -> dict[str, Any]:
    entry = {"step": 20, "tier": "durable", "bytes": 1234567, "status": "committed"}
    lost = {"step": 40, "tier": "durable", "bytes": None, "status": "incomplete", "trusted": None}
    return {
        "latest_restorable": latest,
        "checkpoints": [
            entry | {"trusted": None, "state_digest": "ab" * 16},
            lost | {"state_digest": None},
        ],
    }


def test_checkpoint_list_finds_the_directory_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    places: list[Any] = []

    def list_checkpoints(directory: str, local: list[Path]) -> dict[str, Any]:
        asked.append(directory)
        places.append(local)
        return listing(20)

    fake = SimpleNamespace(list_checkpoints=list_checkpoints)
    monkeypatch.setitem(sys.modules, "jaxrel.checkpoint.listing", fake)
    run = tmp_path / "run"
    (run / "ledger").mkdir(parents=True)
    assert main(["checkpoint", "list", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == listing(20)
    (run / "config.yaml").write_text("run: {dir: elsewhere}\n")
    assert main(["checkpoint", "list", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"step       20  committed   {'ab' * 16}  1,234,567 bytes",
        "step       40  incomplete  unknown",
        "latest restorable: step 20",
    ]
    (run / "config.yaml").write_text("checkpoint: {dir: gs://bucket/c}\n")
    assert main(["checkpoint", "list", str(run)]) == 0
    assert main(["checkpoint", "list", "gs://bucket/d"]) == 0
    (run / "config.yaml").write_text(f"checkpoint: {{local_dir: '{tmp_path}/{{host}}'}}\n")
    keep_name(run, "0123456789abcdef")
    (tmp_path / "host3" / "0123456789abcdef").mkdir(parents=True)
    assert main(["checkpoint", "list", str(run)]) == 0
    assert "step       20  durable  committed   abab" in capsys.readouterr().out
    assert asked[:4] == [f"{run}/checkpoints"] * 2 + ["gs://bucket/c", "gs://bucket/d"]
    assert places == [[]] * 4 + [[tmp_path / "host3" / "0123456789abcdef"]]
