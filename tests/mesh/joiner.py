"""One process of a job, for test_join: joins, and says in JSON what it sees of the others."""

import json
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrel.config import JobConfig
from jaxrel.exit_codes import JaxrelError
from jaxrel.mesh.join import joined, use_cpu_devices


def listening(port: int) -> list[str]:
    """The addresses, in the kernel's hexadecimal, at which this machine listens on `port`."""
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            for row in file.read().splitlines()[1:]:
                address, its_port = row.split()[1].split(":")
                if row.split()[3] == "0A" and int(its_port, 16) == port:
                    found.add(address)
    return sorted(found)


def main() -> None:
    job = JobConfig(**json.loads(sys.argv[1]))
    use_cpu_devices(2)
    with joined(job):
        ids = multihost_utils.process_allgather(np.int32(jax.process_index()))
        port = int((job.coordinator or ":0").rpartition(":")[2])
        seen = {"processes": ids.tolist(), "devices": jax.device_count(), "at": listening(port)}
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    try:
        main()
    except JaxrelError as error:
        print(f"jaxrel: {error}", file=sys.stderr)
        sys.exit(error.code)
