"""One process of a job, for test_compile_cache: compiles a program with a collective, and says in
JSON how often the cache was asked and how often it knew."""

import json
import sys

import jax
import jax.monitoring
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrel.config import JobConfig
from jaxrel.mesh.compile_cache import use_compile_cache
from jaxrel.mesh.join import joined, use_cpu_devices

COUNTED = ("compile_requests_use_cache", "cache_hits", "cache_misses")


def main() -> None:
    counts = dict.fromkeys(COUNTED, 0)

    def count(event: str, **_: object) -> None:
        name = event.rpartition("/")[2]
        if name in counts:
            counts[name] += 1

    job = JobConfig(**json.loads(sys.argv[1]))
    use_cpu_devices(2)
    with joined(job):
        jax.jit(lambda x: x + 1)(1.0)  # before there is a cache
        jax.monitoring.register_event_listener(count)
        use_compile_cache(sys.argv[2])
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        split, whole = (NamedSharding(mesh, PartitionSpec(*a)) for a in (("data",), ()))
        x = jax.make_array_from_callback((8,), split, lambda index: jnp.arange(8.0)[index])
        total = jax.jit(lambda x: jnp.sum(jnp.sin(x)), out_shardings=whole)(x)
        print(json.dumps({"total": float(total), **counts}), flush=True)


if __name__ == "__main__":
    main()
