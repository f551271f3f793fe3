"""All processes of a job meet before JAX starts, or learn by a deadline who is missing.

JAX's own wait aborts the process (exit 134) when somebody does not come, with a stack trace
in place of a name. So process 0 first listens on the coordinator's port itself, everybody
reports to it, and it answers all of them alike; then the port is JAX's.
"""

import contextlib
import hmac
import json
import socket
import time
from collections.abc import Iterable

from jaxrel.exit_codes import FailedError

_POLL_S = 0.02


def meet(
    coordinator: str, process_id: int, num_processes: int, deadline_s: float, token: str = ""
) -> None:
    """Return when all `num_processes` have reported to process 0 at `coordinator`.

    `token` is the job's secret: a report without it is not counted. Raises FailedError
    naming the processes that are missing after `deadline_s` seconds.
    """
    host, _, port = coordinator.rpartition(":")
    address = (host.strip("[]"), int(port))
    ends = time.monotonic() + deadline_s
    if process_id == 0:
        _host(address, num_processes, ends, deadline_s, token)
    else:
        _report(address, process_id, ends, deadline_s, token)
        _wait_for_port(address, ends)


def _host(address: tuple[str, int], count: int, ends: float, deadline_s: float, token: str) -> None:
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(address)
        except OSError as error:
            raise FailedError(
                f"job.coordinator: got {address[0]}:{address[1]}: process 0 cannot listen there:"
                f" {error.strerror}"
            ) from None
        server.listen(count)
        here: dict[int, socket.socket] = {}
        try:
            while len(here) < count - 1 and (left := ends - time.monotonic()) > 0:
                server.settimeout(left)
                try:
                    peer, _ = server.accept()
                    process = _hello(peer, token)
                except (OSError, ValueError):
                    continue  # out of time, or a stranger
                if process is None or not 0 < process < count:
                    peer.close()
                    continue
                here[process] = peer  # a process that was restarted reports again
            missing = [p for p in range(1, count) if p not in here]
            for peer in here.values():
                _send(peer, {"missing": missing})
        finally:
            for peer in here.values():
                peer.close()
    if missing:
        raise FailedError(_absent(missing, count, deadline_s))


def _hello(peer: socket.socket, token: str) -> int | None:
    """The process number that a peer reports, or None without the job's token."""
    peer.settimeout(5.0)
    message = json.loads(peer.makefile("rb").readline(4096) or b"null")
    if not isinstance(message, dict) or not isinstance(message.get("process"), int):
        return None
    known = hmac.compare_digest(str(message.get("token", "")).encode(), token.encode())
    return message["process"] if known else None


def _report(
    address: tuple[str, int], process: int, ends: float, deadline_s: float, token: str
) -> None:
    where = f"{address[0]}:{address[1]}"
    while (left := ends - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=min(left, 5.0)) as peer:
                _send(peer, {"process": process, "token": token})
                peer.settimeout(left + 5.0)  # process 0 speaks first when time is up
                answer = json.loads(peer.makefile("rb").readline(65536) or b"null")
        except (OSError, ValueError):
            time.sleep(_POLL_S)
            continue
        if not isinstance(answer, dict):
            time.sleep(_POLL_S)  # process 0 went away before all were there
            continue
        if answer["missing"]:
            raise FailedError(f"{_absent(answer['missing'], None, deadline_s)} (told by process 0)")
        return
    raise FailedError(
        f"job.coordinator: got {where}: process 0 did not answer there within {deadline_s:g} s"
    )


def _wait_for_port(address: tuple[str, int], ends: float) -> None:
    """Until JAX listens: a client that comes too early waits a second before it tries again."""
    while time.monotonic() < ends:
        try:
            socket.create_connection(address, timeout=1.0).close()
            return
        except OSError:
            time.sleep(_POLL_S)


def _send(peer: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # it is gone; whoever waits for it has a deadline
        peer.sendall(json.dumps(message).encode() + b"\n")


def _absent(missing: Iterable[int], count: int | None, deadline_s: float) -> str:
    names = ", ".join(str(p) for p in missing)
    of = f" of {count}" if count else ""
    return f"job: missing processes after {deadline_s:g} s: {names}{of}"
