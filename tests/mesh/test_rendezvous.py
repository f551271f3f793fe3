"""Meeting before JAX starts: who is missing, who does not count. Threads stand for processes."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from jaxrel.exit_codes import FailedError
from jaxrel.mesh.rendezvous import is_loopback, meet

pytestmark = pytest.mark.core


@pytest.fixture
def coordinator() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@contextlib.contextmanager
def reported(coordinator: str, process: int, token: str = "") -> Iterator[socket.socket]:
    """A process that has reported and waits; leaving the block, it dies."""
    host, port = coordinator.split(":")
    while True:
        try:
            peer = socket.create_connection((host, int(port)))
            break
        except OSError:
            time.sleep(0.01)
    with peer:
        peer.sendall(json.dumps({"process": process, "token": token}).encode() + b"\n")
        yield peer


def outcome(future: "Future[None]") -> str:
    """What a process ended with."""
    error = future.exception(30)
    assert error is None or isinstance(error, FailedError), error
    return str(error or "met")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0)])
def test_all_meet_whoever_comes_first(
    coordinator: str, pool: ThreadPoolExecutor, order: tuple[int, ...]
) -> None:
    met = []
    for process in order:
        met.append(pool.submit(meet, coordinator, process, 4, 20.0, "secret"))
        time.sleep(0.05)
        assert not all(future.done() for future in met) or process == order[-1]
    host, port = coordinator.split(":")
    assert outcome(met[order.index(0)]) == "met"
    with socket.create_server((host, int(port))):  # JAX's coordinator; the others wait for it
        assert [outcome(future) for future in met] == ["met"] * 4


def test_one_process_meets_nobody(coordinator: str) -> None:
    meet(coordinator, 0, 1, 0.1)
    host, port = coordinator.split(":")
    with socket.create_server((host, int(port))) as server:  # the port is left to JAX
        assert server.getsockname()[1] == int(port)


def test_the_missing_are_named_to_everybody(coordinator: str, pool: ThreadPoolExecutor) -> None:
    found = [pool.submit(meet, coordinator, process, 4, 0.5) for process in (0, 2)]
    texts = [outcome(future) for future in found]
    assert texts[0] == "job: processes 1, 3 are missing after 0.5 s"
    assert texts[1] == "job: processes 1, 3 are missing after 0.5 s (told by process 0)"


def test_without_process_0_it_is_named(coordinator: str, pool: ThreadPoolExecutor) -> None:
    found = [pool.submit(meet, coordinator, process, 3, 0.3) for process in (1, 2)]
    says = f"job.coordinator: got {coordinator}: process 0 did not answer there within 0.3 s"
    assert [outcome(future) for future in found] == [says, says]


def test_a_report_without_the_token_does_not_count(
    coordinator: str, pool: ThreadPoolExecutor
) -> None:
    """A process of another job, or of an attempt that should be dead."""
    host = pool.submit(meet, coordinator, 0, 3, 0.5, "this job")
    other = pool.submit(meet, coordinator, 1, 3, 0.5, "another job")
    mine = pool.submit(meet, coordinator, 2, 3, 0.5, "this job")
    assert outcome(host) == "job: process 1 is missing after 0.5 s"
    assert outcome(mine) == "job: process 1 is missing after 0.5 s (told by process 0)"
    assert "process 0 did not answer there" in outcome(other)


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"PRI * HTTP/2.0\r\n\r\n", b"[]\n", b"{}\n", b'{"process": "1"}\n', b"\xff\xfe\n",
     b'{"process": 0}\n', b'{"process": 2}\n', b'{"process": -1}\n', b"x" * 100_000],
)  # fmt: skip
def test_strangers_do_not_count_and_do_no_harm(
    coordinator: str, pool: ThreadPoolExecutor, line: bytes
) -> None:
    host = pool.submit(meet, coordinator, 0, 2, 5.0)
    with reported(coordinator, 99):
        pass
    where, port = coordinator.split(":")
    with socket.create_connection((where, int(port))) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(line)
            stranger.shutdown(socket.SHUT_WR)
        assert not host.done()
    with reported(coordinator, 1) as peer:
        assert json.loads(peer.makefile().readline()) == {"missing": []}
    assert outcome(host) == "met"


def test_a_process_that_died_while_it_waited_is_missing(
    coordinator: str, pool: ThreadPoolExecutor
) -> None:
    host = pool.submit(meet, coordinator, 0, 3, 1.0)
    with reported(coordinator, 1):
        pass
    with reported(coordinator, 2) as peer:
        told = peer.makefile().readline()
    assert json.loads(told) == {"missing": [1]}
    assert outcome(host) == "job: process 1 is missing after 1 s"


def test_a_process_that_was_restarted_reports_again(
    coordinator: str, pool: ThreadPoolExecutor
) -> None:
    host = pool.submit(meet, coordinator, 0, 3, 20.0)
    with reported(coordinator, 1), reported(coordinator, 1) as again, reported(coordinator, 2):
        assert json.loads(again.makefile().readline()) == {"missing": []}
    assert outcome(host) == "met"


def test_a_late_process_is_waited_for(coordinator: str, pool: ThreadPoolExecutor) -> None:
    host = pool.submit(meet, coordinator, 0, 2, 20.0)
    time.sleep(0.3)
    with reported(coordinator, 1) as peer:
        assert json.loads(peer.makefile().readline()) == {"missing": []}
    assert outcome(host) == "met"


def test_a_process_0_that_died_is_waited_for_again(
    coordinator: str, pool: ThreadPoolExecutor
) -> None:
    """A new process 0 on the same port hears those who were there before it."""
    host, port = coordinator.split(":")
    with socket.create_server((host, int(port))) as dead:
        early = pool.submit(meet, coordinator, 1, 2, 20.0)
        peer, _ = dead.accept()
        peer.close()
    threading.Event().wait(0.1)
    assert outcome(pool.submit(meet, coordinator, 0, 2, 20.0)) == "met"
    with socket.create_server((host, int(port))):
        assert outcome(early) == "met"


def test_a_port_in_use_is_named(coordinator: str) -> None:
    host, port = coordinator.split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(FailedError, match=f"got {coordinator}: process 0 cannot listen there: Addr"),
    ):
        meet(coordinator, 0, 2, 5.0)


@pytest.mark.parametrize(
    ("coordinator", "loopback"),
    [("localhost:1", True), ("127.0.0.1:1", True), ("127.0.1.1:1", True), ("[::1]:1", True),
     ("10.0.0.1:1", False), ("[fe80::1]:1", False), ("node0:1", False), ("0.0.0.0:1", False)],
)  # fmt: skip
def test_what_is_loopback(coordinator: str, loopback: bool) -> None:
    assert is_loopback(coordinator) is loopback


def test_a_name_of_this_machine_is_reachable_from_outside(
    coordinator: str, pool: ThreadPoolExecutor
) -> None:
    """Where a host's own name is a loopback address, the others still find process 0."""
    port = coordinator.split(":")[1]
    host = pool.submit(meet, f"{socket.gethostname()}:{port}", 0, 2, 5.0)
    with reported(coordinator, 1) as peer:  # at another address than that name's
        assert json.loads(peer.makefile().readline()) == {"missing": []}
    assert outcome(host) == "met"
