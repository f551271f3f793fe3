"""What chaos does to a process, and that it does nothing where it is not asked."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrel.chaos import install
from jaxrel.chaos.faults import EXIT, InjectedError


class Step:
    """A training step that counts, and compiles to another one of its kind."""

    layout = "the layout"

    def compiled(self, batch: Any) -> "Step":
        return Step()

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        return SimpleNamespace(step=state.step + 1), batch


def last_step(trainer: Any, begin: int, until: int) -> int:
    """The loop of a trainer, from `begin` completed updates on: how far it comes."""
    step, state = trainer.step.compiled(None), SimpleNamespace(step=begin)
    while state.step < until:
        state, _ = step(state, None)
    return state.step


@pytest.mark.parametrize("compiled", [True, False])
def test_it_raises_instead_of_the_update_that_is_named(compiled: bool) -> None:
    trainer = SimpleNamespace(step=Step())
    install(trainer, raise_at_step=3)
    step, state = trainer.step.compiled(None) if compiled else trainer.step, None
    state = SimpleNamespace(step=1)
    state, record = step(state, "batch")
    assert (state.step, record) == (2, "batch")
    with pytest.raises(InjectedError, match="raised on purpose instead of step 3"):
        step(state, "batch")


def test_whoever_goes_on_from_there_is_spared() -> None:
    trainer = SimpleNamespace(step=Step())
    install(trainer, raise_at_step=3, exit_at_step=2)
    assert last_step(trainer, begin=3, until=6) == 6


def test_the_step_is_else_the_same_and_nothing_is_the_default() -> None:
    trainer = SimpleNamespace(step=Step())
    install(trainer)
    assert trainer.step.layout == trainer.step.compiled(None).layout == "the layout"
    assert last_step(trainer, begin=0, until=5) == 5


CODE = """
import sys
from types import SimpleNamespace
sys.path.insert(0, {here!r})
from test_faults import Step, last_step
from jaxrel.chaos import install

trainer = SimpleNamespace(step=Step())
install(trainer, {name}=3)
log = open({log!r}, "w", buffering=1)
for until in (1, 2):
    log.write(f"{{last_step(trainer, begin=0, until=until)}} ")
    log.flush()
try:
    last_step(trainer, begin={begin}, until=5)
    log.write("written")
    log.flush()
except OSError as error:
    print(error.strerror)
finally:
    print("alive", flush=True)
"""


def process(tmp_path: Path, name: str, begin: int = 0) -> tuple[int, list[str], str]:
    """Exit code, printed lines and log of a process with the fault `name` at step 3."""
    log, here = tmp_path / "log", str(Path(__file__).parent)
    code = CODE.format(here=here, name=name, log=str(log), begin=begin)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.splitlines(), log.read_text()


def test_it_leaves_without_a_word(tmp_path: Path) -> None:
    assert process(tmp_path, "exit_at_step") == (EXIT, [], "1 2 ")


@pytest.mark.parametrize("begin", [0, 4])
def test_from_the_step_on_no_file_grows(tmp_path: Path, begin: int) -> None:
    code, printed, log = process(tmp_path, "fail_writes_at_step", begin)
    assert (code, printed, log) == (0, ["File too large", "alive"], "1 2 ")


def killed_at(monkeypatch: pytest.MonkeyPatch, **how: Any) -> list[int]:
    """The updates before which the process would have been killed, of 400."""
    at: list[int] = []
    trainer = SimpleNamespace(step=Step())
    install(trainer, **how)
    monkeypatch.setattr("os.kill", lambda pid, number: at.append(state.step + 1))
    step, state = trainer.step.compiled(None), SimpleNamespace(step=0)
    while state.step < 400:
        state, _ = step(state, None)
    return at


def test_random_kills_follow_from_seed_process_and_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = {
        (seed, process, attempt): killed_at(
            monkeypatch, kill_rate=0.05, seed=seed, process=process, attempt=attempt
        )
        for seed in (1, 2)
        for process in (0, 1)
        for attempt in (1, 2)
    }
    assert len({tuple(at) for at in drawn.values()}) == 8
    assert all(5 <= len(at) <= 40 for at in drawn.values())  # 20 are expected, 4 sigma wide
    again = killed_at(monkeypatch, kill_rate=0.05, seed=1, process=0, attempt=1)
    assert again == drawn[1, 0, 1]
    assert killed_at(monkeypatch, kill_rate=0.05, seed=1, rank=1, process=0) == []
    assert killed_at(monkeypatch, kill_rate=0.0, seed=1) == []
