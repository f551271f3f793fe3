"""A job that trains loses a host for good, goes on with half of its devices, and grows again."""

import os
import signal
import time
from pathlib import Path

import pytest

from jaxrel.events import Resumed
from jaxrel.ledger.reader import read
from tests.supervise import faulty, jobs
from tests.supervise.faulty import Fault
from tests.supervise.jobs import Launched, agent_of, placements
from tests.supervise.test_jax_faults import check_same_bits

DEADLINE_S = 300.0


@pytest.mark.slow
def test_a_host_that_is_lost_and_comes_back_leaves_the_same_bits(
    tmp_path: Path, compiled: Path, undisturbed: jobs.Finished
) -> None:
    run = tmp_path / "run"
    lost, killed = Fault("is_late", 1, rank=0, step=7), Fault("killed", 2, rank=0, step=12)
    until_back = Fault("sleeps_till_the_host_is_back", 2, rank=0, step=11)
    command = faulty.train(run, compiled, lost, until_back, killed, evaluation__every=0)
    flags = ("--hosts", "2", "--cpu-devices", "4", "--host-return", "20", "--shrink-after", "0")
    with Launched(run, command, *flags) as launched:
        ends = time.monotonic() + DEADLINE_S
        while not faulty.note(run, lost).exists():
            assert time.monotonic() < ends, launched.text
            time.sleep(0.05)
        os.kill(agent_of(run, "host1"), signal.SIGKILL)
        launched.wait_for("host1 is back", DEADLINE_S)
        (run / "back").touch()
        done = launched.finish(DEADLINE_S)
    assert done.code == 0, done.text
    assert placements(done) == [["host0", "host1"], ["host0"], ["host0", "host1"]]
    resumed = [r.event for r in read(run).records if r.source == "rank0"]
    assert [e.devices for e in resumed if isinstance(e, Resumed)] == [8, 4, 8]
    check_same_bits(run, undisturbed)
