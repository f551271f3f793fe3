"""Devices and processes: what must be set before JAX is first used."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
from jax._src.clusters import ClusterEnv

from jaxrel.config import JobConfig
from jaxrel.exit_codes import DivergedError, FailedError, PreemptedError, UsageError
from jaxrel.mesh.rendezvous import is_loopback, meet

CPU_THREADS = 16
"""Threads of XLA's pool in each process, whatever the machine."""


def fix_cpu_threads() -> None:
    """Make the CPU backend's results independent of the machine; before its first use.

    XLA splits a matrix product on CPU by the size of its thread pool, sometimes along the
    summed axis, and sizes the pool by the cores or the devices of the process. With up to
    16 devices in a process it then has 16 threads everywhere. NPROC in the environment wins.
    """
    os.environ.setdefault("NPROC", str(CPU_THREADS))


def use_cpu_devices(count: int) -> None:
    """Simulate `count` CPU devices in this process; before the first use of JAX's devices."""
    fix_cpu_threads()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


@contextmanager
def joined(job: JobConfig, *, heartbeat_timeout_s: int = 100) -> Iterator[None]:
    """Be a process of the job while the block runs; nothing to do for a job of one process.

    A normal end waits for the others, and so does one that all processes come to at the same
    step. On any other exception this process leaves without waiting: a dead peer never comes
    to that barrier. Raises FailedError naming missing processes, and UsageError when JAX is to
    detect a job and finds none.
    """
    if job.num_processes == 1 or (job.coordinator is None and not job.detect):
        yield
        return
    # Gloo carries collectives between CPU processes; other backends do not read this.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    token = os.environ.get("JAXREL_TOKEN", "")
    coordinator, count, process, devices = _members(job)
    meet(coordinator, process, count, job.join_deadline_s, token)
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            process,
            devices,
            initialization_timeout=max(1, int(job.join_deadline_s)),
            heartbeat_timeout_seconds=heartbeat_timeout_s,
            # JAX's default listens on every address.
            coordinator_bind_address=coordinator if is_loopback(coordinator) else None,
        )
    except (RuntimeError, ValueError) as error:
        raise FailedError(f"job: could not be joined: {' '.join(str(error).split())}") from error
    try:
        yield
    except (PreemptedError, DivergedError):  # all processes end so, at the same step
        jax.distributed.shutdown()
        raise
    jax.distributed.shutdown()


def _members(job: JobConfig) -> tuple[str, int, int, Sequence[int] | None]:
    """Coordinator, number of processes, this process, and its local devices where JAX chooses."""
    if not job.detect:
        assert job.coordinator and job.num_processes and job.process_id is not None  # config.check
        return job.coordinator, job.num_processes, job.process_id, None
    # What `initialize` would find by itself; there is no public name for it.
    found = ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, max(1, int(job.join_deadline_s))
    )
    coordinator, count, process, devices = found
    if coordinator is None or count is None or process is None:
        raise UsageError(
            "job.detect: got true: JAX detects no cluster here; give job.coordinator,"
            " job.num_processes and job.process_id"
        )
    return coordinator, count, process, devices
