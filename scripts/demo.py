"""Killed, resumed on half the devices, and the same bits: the main job in about a minute."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path

from etils import epath
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from jaxrel.checkpoint import manifest
from jaxrel.checkpoint.listing import newest

STEPS = 60
AFTER_CHECKPOINT = 7
"""Steps that the run goes on after its checkpoint before it is killed: they are lost."""
PLAIN_EVERY = 10
"""Steps between lines where the output is no terminal."""


@dataclass
class Attempt:
    """One process of `jaxrel train`, as its output tells it."""

    exit: int = 0
    resumed_from: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    """Loss and gradient norm as printed, by step."""
    digest: str = ""
    """Of the final state; "" when it was killed."""
    lines: list[str] = field(default_factory=list)

    def read(self, line: str) -> int | None:
        """Take in a line of output; the step that it shows, if it shows one."""
        self.lines.append(line)
        if found := re.match(r"step (\d+)/\d+  (loss \S+  grad norm \S+)", line):
            self.losses[int(found[1])] = found[2]
            return int(found[1])
        if found := re.match(r"resumed from step (\d+)", line):
            self.resumed_from = int(found[1])
        if found := re.match(r"finished: step \d+, state digest (\w+)", line):
            self.digest = found[1]
        return None


class Demo:
    """Runs the attempts in `folder`, and shows a bar on a terminal, lines elsewhere."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.folder, self.config = folder, config
        self.console = Console(highlight=False, soft_wrap=True)
        self.progress = Progress(  # only the bar may shrink
            TextColumn("{task.description}"), TextColumn("{task.completed}/{task.total}"),
            BarColumn(), TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(table_column=Column(no_wrap=True)), console=self.console,
            disable=not self.console.is_terminal,
        )  # fmt: skip

    def train(
        self, what: str, run: Path, devices: int, kill: Callable[[int], bool] = lambda step: False
    ) -> Attempt:
        """One process to its end, or until `kill(step)` is true after a step was shown."""
        task = self.progress.add_task(what, total=STEPS, text="starts and compiles")
        if not self.console.is_terminal:
            self.console.print(f"{what}: starts and compiles")
        attempt, began = Attempt(), time.monotonic()
        with self._process(run, devices) as process:
            assert process.stderr is not None
            for line in process.stderr:
                step = attempt.read(line.rstrip("\n"))
                if step is None:
                    continue
                self.progress.update(task, completed=step, text=attempt.losses[step])
                if not self.console.is_terminal and step % PLAIN_EVERY == 0:
                    seconds = time.monotonic() - began
                    shown = f"step {step}/{STEPS}  {attempt.losses[step]}"
                    self.console.print(f"{what}: {shown}  {seconds:.0f} s")
                if kill(step):
                    process.kill()
                    self.progress.update(task, text="killed by SIGKILL")
            attempt.exit = process.wait()
        self.progress.stop_task(task)
        return attempt

    @contextmanager
    def _process(self, run: Path, devices: int) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "jaxrel.cli", "train", str(self.config)]
        flags = {"run.dir": run, "run.steps": STEPS, "run.print_every": 1,
                 "mesh.cpu_devices": devices, "checkpoint.keep": STEPS}  # fmt: skip
        for key, value in flags.items():
            command += [f"--{key}", str(value)]
        mine = {name: v for name, v in os.environ.items() if not name.startswith("JAXREL_")}
        mine |= {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled")}
        process = subprocess.Popen(
            command, env=mine, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def run(self) -> int:
        """The three attempts and what they show; 0 only when the bits are the same."""
        touched, alone = self.folder / "killed-and-resumed", self.folder / "undisturbed"
        checkpoints = touched / "checkpoints"

        def lost_enough(step: int) -> bool:
            return step >= (newest(checkpoints) or STEPS) + AFTER_CHECKPOINT

        with self.progress:
            whole = self.train("undisturbed, 8 devices", alone, 8)
            killed = self.train("to be killed, 8 devices", touched, 8, lost_enough)
            saved = newest(checkpoints) or 0
            resumed = self.train("resumed, 4 devices", touched, 4)
        for name, attempt, code in (
            ("undisturbed", whole, 0), ("killed", killed, -9), ("resumed", resumed, 0),
        ):  # fmt: skip
            if attempt.exit != code:
                self.console.print(f"demo: the {name} run ended with exit code {attempt.exit}:")
                self.console.print("\n".join(attempt.lines[-10:]), markup=False)
                return 70
        return self._report(whole, killed, saved, resumed, checkpoints)

    def _report(
        self, whole: Attempt, killed: Attempt, saved: int, resumed: Attempt, checkpoints: Path
    ) -> int:
        stopped = max(killed.losses)
        once = list(resumed.losses) == list(range(saved + 1, STEPS + 1))
        lineage = {s: x for s, x in killed.losses.items() if s <= saved} | resumed.losses
        position = manifest.read(epath.Path(checkpoints / str(STEPS)))["extra"]["position"]
        facts = {
            f"killed by SIGKILL after step {stopped}; checkpoint of step {saved} was complete":
                0 < saved < stopped,
            f"resumed on 4 devices from step {resumed.resumed_from}":
                resumed.resumed_from == saved,
            f"{STEPS} batches, each once: 1 to {saved} from the killed process, {saved + 1} to "
            f"{STEPS} from the resumed one": once and position["position"] == STEPS,
            "loss and gradient norm of every step equal the undisturbed run's":
                lineage == whole.losses,
            "the final digests are equal": resumed.digest == whole.digest != "",
        }  # fmt: skip
        table = Table("run", "devices", "final state digest", title_justify="left")
        table.add_row("undisturbed", "8", whole.digest)
        table.add_row("killed and resumed", "8, then 4", resumed.digest)
        self.console.print(table)
        for fact, holds in facts.items():
            self.console.print(f"{'yes' if holds else 'NO ':<4} {fact}")
        self.console.print(f"runs: {self.folder}")
        return 0 if all(facts.values()) else 1


def main() -> int:
    """Parse the command line and run the demo."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--dir", type=Path, help="a new or empty folder for the runs")
    folder = parser.parse_args().dir
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="jaxrel-demo-"))
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        print(f"demo: --dir: got {folder}: expected a new or empty folder", file=sys.stderr)
        return 64
    folder = folder.absolute()
    with as_file(files("jaxrel") / "configs" / "tiny.yaml") as config:
        return Demo(folder, config).run()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
