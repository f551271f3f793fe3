"""Real processes that join a job, or learn by the deadline who is missing."""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxrel.exit_codes import ExitCode
from scripts.campaigns.workers import ROOT, Worker, free_port

LOOPBACK = "0100007F"


def start(job: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.mesh.joiner", json.dumps(job)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


def said(out: str) -> dict[str, Any]:
    """A joiner's own line; Gloo writes lines of its own around it."""
    found = re.search(r'\{"processes".*\}', out)
    assert found, out
    return json.loads(found[0])


def explicit(process: int, count: int, port: int, deadline_s: float = 60.0) -> dict[str, Any]:
    where = {"coordinator": f"127.0.0.1:{port}", "join_deadline_s": deadline_s}
    return where | {"process_id": process, "num_processes": count}


@pytest.mark.parametrize(
    ("order", "late_s"), [pytest.param((1, 0), 1.5, marks=pytest.mark.core), ((0, 1, 2, 3), 0.0)]
)
def test_processes_join_whoever_comes_first(order: tuple[int, ...], late_s: float) -> None:
    port, processes = free_port(), []
    for process in order:
        processes.append(start(explicit(process, len(order), port)))
        time.sleep(late_s)
    for process in processes:
        code, out, err = finish(process)
        assert code == 0, err
        seen = said(out)
        assert seen["processes"] == list(range(len(order)))
        assert seen["devices"] == 2 * len(order)
        assert {at[-8:] for at in seen["at"]} == {LOOPBACK}, (
            seen
        )  # nothing listens beyond what was named


@pytest.mark.core
@pytest.mark.parametrize(
    ("count", "there", "says"),
    [
        (2, (0,), "job: process 1 is missing after 3 s"),
        (2, (1,), "process 0 did not answer there within 3 s"),
        (4, (0, 2), "job: processes 1, 3 are missing after 3 s"),
    ],
)
def test_training_ends_by_the_deadline_and_names_the_missing(
    tmp_path: Path, count: int, there: tuple[int, ...], says: str
) -> None:
    port = free_port()
    workers = [
        Worker(
            tmp_path / "run",
            {f"job.{k}": v for k, v in explicit(process, count, port, 3.0).items()},
            cache=tmp_path / "compiled",
        )
        for process in there
    ]
    for worker in workers:
        assert worker.finish(30) == ExitCode.FAILED
        assert len(worker.lines) == 1  # and no traceback
        assert says in worker.lines[0]
    assert not (tmp_path / "run").exists()


def test_a_process_of_another_job_does_not_count() -> None:
    port = free_port()
    mine = start(explicit(0, 2, port, 3.0), JAXREL_TOKEN="this job")
    other = start(explicit(1, 2, port, 3.0), JAXREL_TOKEN="another job")
    found = [finish(process) for process in (mine, other)]
    assert [code for code, _, _ in found] == [ExitCode.FAILED] * 2
    assert found[0][2] == "jaxrel: job: process 1 is missing after 3 s\n"
    assert "process 0 did not answer there" in found[1][2]


def by_open_mpi(process: int, count: int, job: int) -> dict[str, str]:
    """The variables by which JAX detects a job of Open MPI; the port follows from `job`."""
    return {
        "OMPI_MCA_orte_hnp_uri": f"{job * 4096}.0;tcp://127.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
    }


def test_what_jax_detects_is_joined_or_the_missing_are_named() -> None:
    whole, half = random.sample(range(4096), 2)
    job = {"detect": True, "join_deadline_s": 60.0}
    both = [start(job, **by_open_mpi(process, 2, whole)) for process in range(2)]
    alone = start(job | {"join_deadline_s": 3.0}, **by_open_mpi(0, 2, half))
    for process in both:
        code, out, err = finish(process)
        assert code == 0, err
        assert said(out)["processes"] == [0, 1]
    code, _, err = finish(alone)
    assert (code, err) == (ExitCode.FAILED, "jaxrel: job: process 1 is missing after 3 s\n")


@pytest.mark.core
def test_where_jax_detects_nothing_it_says_so() -> None:
    code, _, err = finish(start({"detect": True}))
    assert code == ExitCode.USAGE
    assert err.startswith("jaxrel: job.detect: got true: JAX detects no cluster here")
    assert len(err.splitlines()) == 1
