"""All processes of a job meet before JAX starts, or learn by a deadline who is missing.

JAX's own wait aborts the process (exit 134) when somebody does not come, with a stack trace
in place of a name. So process 0 first listens on the coordinator's port itself, everybody
reports to it, and it answers all of them alike; then the port is JAX's.
"""

import contextlib
import hmac
import ipaddress
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
    if num_processes == 1:
        return
    if process_id == 0:
        _host(coordinator, num_processes, ends, deadline_s, token)
    else:
        _report(address, process_id, ends, deadline_s, token)
        _wait_for_port(address, ends)


def is_loopback(coordinator: str) -> bool:
    """Whether `coordinator`, `host:port`, is spelt as an address of this machine alone.

    A machine's own name may resolve to a loopback address on that machine and to another one
    elsewhere, so names other than localhost are not.
    """
    host = coordinator.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host(coordinator: str, count: int, ends: float, deadline_s: float, token: str) -> None:
    """Process 0's part: count the reports, then answer them all alike."""
    here: dict[int, socket.socket] = {}
    with _listen(coordinator, count) as server:
        try:
            while True:
                here = {p: peer for p, peer in here.items() if _waits(peer)}
                left = ends - time.monotonic()
                if len(here) == count - 1 or left <= 0:
                    break
                server.settimeout(left)
                try:
                    peer, _ = server.accept()
                    process = _hello(peer, token)
                except (OSError, ValueError):
                    continue  # out of time, or a stranger
                if process is not None and 0 < process < count:
                    here[process] = peer  # a process that was restarted reports again
            missing = [p for p in range(1, count) if p not in here]
            for peer in here.values():
                _send(peer, {"missing": missing})
        finally:
            for peer in here.values():
                peer.close()
    if missing:
        raise FailedError(_absent(missing, deadline_s))


def _listen(coordinator: str, count: int) -> socket.socket:
    """A server on the coordinator's port: on loopback if it is there, else on all addresses."""
    host, _, port = coordinator.rpartition(":")
    try:
        if is_loopback(coordinator):
            family, _, _, _, address = socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )[0]
            return socket.create_server(address[:2], family=family, backlog=count)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(
            ("", int(port)), family=family, backlog=count, dualstack_ipv6=both
        )
    except OSError as error:
        raise FailedError(
            f"job.coordinator: got {coordinator}: process 0 cannot listen there: {error.strerror}"
        ) from None


def _waits(peer: socket.socket) -> bool:
    """Whether a process that reported is still there."""
    peer.setblocking(False)
    try:
        return peer.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


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
        if not isinstance(answer, dict) or "missing" not in answer:
            time.sleep(_POLL_S)  # process 0 went away, or this socket met itself on a local port
            continue
        if answer["missing"]:
            raise FailedError(f"{_absent(answer['missing'], deadline_s)} (told by process 0)")
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
        peer.settimeout(5.0)
        peer.sendall(json.dumps(message).encode() + b"\n")


def _absent(missing: Iterable[int], deadline_s: float) -> str:
    names = [str(p) for p in missing]
    who = f"process {names[0]} is" if len(names) == 1 else f"processes {', '.join(names)} are"
    return f"job: {who} missing after {deadline_s:g} s"
