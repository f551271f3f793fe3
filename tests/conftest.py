"""Every test sees eight simulated CPU devices; the processes that tests start see the CPU."""

import os

import jax

os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
