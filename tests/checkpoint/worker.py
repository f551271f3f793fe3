"""Processes that the tests start: `python -m tests.checkpoint.worker MODE ARGUMENTS`."""

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrel.checkpoint import Checkpointer, host_random
from jaxrel.checkpoint.shared import check_shared
from jaxrel.exit_codes import JaxrelError
from tests.checkpoint import states

WIDTH = 512


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def limited(directory: str) -> None:
    """A save that cannot be written: files may not grow beyond a size."""
    state = {"x": jnp.ones(100_000)}
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        checkpointer.save(2, state)
        try:
            for _ in range(1000):
                checkpointer.check()
                time.sleep(0.01)
        except JaxrelError as error:
            say(check=str(error), code=error.code, latest=checkpointer.latest())
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpointer.save(2, state)
        checkpointer.wait()
        say(latest=checkpointer.latest())
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        checkpointer.save(3, state)  # the last save of the run fails


def interrupted(directory: str) -> None:
    """Ctrl-C while a save is in flight."""
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, {"x": jnp.ones(1_000_000)})
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def rank(index: str, port: str, directory: str) -> None:
    """One of two processes with four devices each."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    root = Path(directory)
    mesh, report = states.mesh(4, 2), {}
    np.random.seed(int(index))
    random.seed(int(index))
    with jax.set_mesh(mesh), Checkpointer(root / "ours", keep=2) as checkpointer:
        report["start"] = checkpointer.latest()
        captured = host_random.capture()
        for step in (1, 2, 3):
            state = states.make(step, mesh, WIDTH)
            checkpointer.save(step, state, extra={"host_random": captured})
            state = jax.jit(lambda x: x, donate_argnums=0)(state)
            checkpointer.check()
        checkpointer.wait()
        report["latest"] = checkpointer.latest()
        restored, manifest = checkpointer.restore(states.abstract(states.mesh(2, 4), WIDTH))
        report["equal"] = local_bits(restored) == local_bits(
            states.make(3, states.mesh(2, 4), WIDTH)
        )
        drawn = [np.random.random(), random.random()]
        report["random"] = host_random.restore(manifest["extra"]["host_random"], seed=0, step=3)
        report["random_equal"] = [np.random.random(), random.random()] == drawn
        report["backwards"] = refusal(checkpointer.save, 2, state)
        here = jax.device_put(np.ones(3), jax.local_devices()[0])
        report["local"] = [refusal(checkpointer.save, 4, {"x": x}) for x in (here, np.ones(3))]
        read = checkpointer._arrays.restore
        if index == "1":
            checkpointer._arrays.restore = fail  # type: ignore[method-assign]
        report["one_fails"] = refusal(checkpointer.restore, states.abstract(mesh, WIDTH), 3)
        checkpointer._arrays.restore = read  # type: ignore[method-assign]
        whole = NamedSharding(mesh, PartitionSpec())
        with Checkpointer(root / "replicated") as other:
            other.save(1, {"x": jnp.arange(2.0**16, device=whole), "y": state["step"]})
        theirs = Checkpointer(root / "theirs")
        restored, _ = theirs.restore(states.abstract(mesh, WIDTH))
        check_shared(root / "ours")
        report["unshared"] = refusal(check_shared, root / f"own{index}")
        report["theirs_equal"] = local_bits(restored) == local_bits(states.make(9, mesh, WIDTH))
    say(**report)
    jax.distributed.shutdown()


def tiers(index: str, port: str, directory: str, what: str) -> None:
    """One of two hosts that share the durable directory and have a disk of their own each."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    root, mesh = Path(directory), states.mesh(2, 4)
    checkpointer = Checkpointer(root / "durable", local_dir=root / f"disk{index}")
    if what == "save":
        checkpointer.save(2, states.make(2, mesh, WIDTH))
        checkpointer.wait()
        for step in (4, 6):
            state = states.make(step, mesh, WIDTH)
            taken = checkpointer.save_local(step, state, extra={"of": index})
            jax.block_until_ready(jax.jit(lambda x: x, donate_argnums=0)(state))
            assert taken and checkpointer.local is not None
            checkpointer.local.wait()
        say(saved=6)
        time.sleep(60)  # to be killed
    latest = checkpointer.latest()
    said = checkpointer.manifest(latest or 0)["extra"]
    other = states.mesh(4, 2)
    restored, found = checkpointer.restore(states.abstract(other, WIDTH))
    equal = local_bits(restored) == local_bits(states.make(found["step"], other, WIDTH))
    refused = [step for step, _ in checkpointer.refused()]
    say(latest=latest, step=found["step"], equal=equal, extra=said, refused=refused)
    jax.distributed.shutdown()


def fail(*_: Any, **__: Any) -> None:
    raise OSError(5, "Input/output error")


def refusal(act: Any, *args: Any) -> str:
    try:
        act(*args)
    except JaxrelError as error:
        return f"{int(error.code)} {error}"
    return "accepted"


def local_bits(tree: Any) -> list[bytes]:
    """The shards that this process holds."""
    return [
        np.asarray(shard.data).tobytes()
        for leaf in jax.tree.leaves(tree)
        for shard in (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        ).addressable_shards
    ]


if __name__ == "__main__":
    modes = {f.__name__: f for f in (limited, interrupted, rank, tiers)}
    modes[sys.argv[1]](*sys.argv[2:])
