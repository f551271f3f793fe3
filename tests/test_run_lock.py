"""Two jobs never write into one run directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrel.exit_codes import UsageError
from jaxrel.run_lock import claim

HOLDER = """
import sys
from jaxrel.run_lock import claim
claim(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.core
def test_the_second_job_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    run = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=rf"run.dir: got '{run}': process {holder.pid} is"):
            claim(run)
        holder.kill()
    claim(run)
    assert (run / ".lock").read_text() == f"{os.getpid()}\n"
