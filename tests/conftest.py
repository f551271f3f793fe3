"""Every test sees eight simulated CPU devices; the processes that tests start see the CPU."""

import os
import signal

import jax

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "16"  # the thread pool of an exact run (jaxrel.mesh.join)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# Whoever started this in the background may have had signals ignored, and children inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
