"""A run whose only checkpoints before its end are on its hosts' own disks."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxrel.checkpoint.listing import newest
from jaxrel.events import IntervalPlanned, LocalSaved, Resumed
from jaxrel.exit_codes import ExitCode
from jaxrel.ledger.reader import read
from scripts.campaigns.workers import Worker, final_digest, free_port

LOCAL = {"checkpoint.interval": 100, "checkpoint.local_interval": 4}


@pytest.mark.slow
def test_a_job_that_lost_a_host_goes_on_from_the_copy_on_another(
    tmp_path: Path, compiled: Path, undisturbed: dict[str, Any]
) -> None:
    """Two hosts of four devices are killed, one is gone for ever; one of eight ends exactly."""
    run, disks = tmp_path / "run", tmp_path / "disks"
    flags = {**LOCAL, "checkpoint.local_dir": f"{disks}/{{host}}"}
    job = {"job.coordinator": f"127.0.0.1:{free_port()}", "job.num_processes": 2}
    workers = [
        Worker(
            run,
            {**flags, **job, "mesh.cpu_devices": 4, "job.process_id": i},
            cache=compiled,
            environment={"JAXREL_HOST": f"host{i}"},
        )
        for i in range(2)
    ]
    workers[0].wait_for(r"^step 10/")
    for worker in workers:
        worker.kill()
    assert not (run / "checkpoints").exists() or not list((run / "checkpoints").iterdir())
    shutil.rmtree(disks / "host0")

    left = {"JAXREL_HOST": "host1"}
    last = Worker(run, {**flags, "mesh.cpu_devices": 8}, cache=compiled, environment=left)
    assert last.finish() == 0
    assert "resumed from step 8" in last.lines[0]
    assert final_digest(last.lines) == undisturbed["final_digest"]
    (folder,) = (disks / "host1").iterdir()
    assert list(folder.iterdir()) == [], "a finished run leaves nothing behind"

    events = [record.event for record in read(run).records]
    assert [e.step for e in events if isinstance(e, Resumed)][-1] == 8
    assert {4, 8} <= {e.step for e in events if isinstance(e, LocalSaved)}


@pytest.mark.slow
def test_a_new_run_in_the_place_of_an_old_one_takes_nothing_of_it(
    tmp_path: Path, compiled: Path
) -> None:
    run = tmp_path / "run"
    flags = {**LOCAL, "checkpoint.local_dir": tmp_path / "disk", "mesh.cpu_devices": 8}
    first = Worker(run, flags, cache=compiled)
    first.wait_for(r"^step 6/")
    first.kill()
    shutil.rmtree(run)
    second = Worker(run, flags, cache=compiled)
    second.wait_for(r"^step 1/")
    second.kill()
    assert not any("resumed" in line for line in second.lines)


@pytest.mark.slow
def test_auto_plans_both_tiers_each_for_its_own_failures(tmp_path: Path, compiled: Path) -> None:
    run = tmp_path / "run"
    flags = {"checkpoint.interval": "auto", "checkpoint.local_dir": tmp_path / "disk"}
    worker = Worker(run, {**flags, "run.steps": 45, "mesh.cpu_devices": 8}, cache=compiled)
    assert worker.finish() == 0, worker.lines
    plans = [r.event for r in read(run).records if isinstance(r.event, IntervalPlanned)]
    assert {(p.tier, round(p.share, 3)) for p in plans} == {("durable", 0.1), ("local", 0.9)}
    assert any(p.cost_s is not None for p in plans if p.tier == "local")
    assert json.loads((run / "provenance.json").read_text())


@pytest.mark.slow
def test_only_what_is_durable_completes_a_run_or_a_stop(tmp_path: Path, compiled: Path) -> None:
    run = tmp_path / "run"
    flags = {**LOCAL, "checkpoint.local_dir": tmp_path / "disk", "mesh.cpu_devices": 8}
    first = Worker(run, flags, cache=compiled)
    first.wait_for(r"^step 14/")
    first.kill()
    stopped = Worker(run, flags, cache=compiled)
    stopped.wait_for("resumed from step 12")
    stopped.process.terminate()
    assert stopped.finish() == ExitCode.PREEMPTED, stopped.lines
    saved = int(re.findall(r"step (\d+) is saved", stopped.lines[-1])[0])
    assert saved >= 12 and newest(run / "checkpoints") == saved

    again = tmp_path / "again"
    first = Worker(again, flags, cache=compiled)
    first.wait_for(r"^step 14/")
    first.kill()
    complete = Worker(again, {**flags, "run.steps": 12}, cache=compiled)
    assert complete.finish() == 0, complete.lines
    assert any("resumed from step 12" in line for line in complete.lines)
    assert newest(again / "checkpoints") == 12
    done = Worker(again, {**flags, "run.steps": 12}, cache=compiled)
    assert done.finish() == 0 and "already complete" in done.lines[0]
