"""Who is blamed, for what is left of a gang."""

from dataclasses import replace

import pytest

from jaxrel.heartbeat import Beat
from jaxrel.supervise.deadlines import Deadlines, Pace
from jaxrel.supervise.ranks import Rank
from jaxrel.supervise.rootcause import Cause, find

NOW = 1000.0
GLOO = "XlaRuntimeError: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:4711"


def rank(number: int, phase: str = "wait", done: int = 5, ahead: int = 1, **more: object) -> Rank:
    beat = Beat(phase, done, done + ahead, 1, True, str(more.pop("error", "")))
    alive = Rank(number, f"host{number}", NOW - float(str(more.pop("silent", 1.0))), beat)
    return replace(alive, left_at=NOW - 0.5 if "code" in more else None, **more)  # type: ignore[arg-type]


def cause(*ranks: Rank, speaks: bool = True) -> Cause:
    return find(ranks, Pace(), Deadlines(10.0), speaks, NOW)


@pytest.mark.core
@pytest.mark.parametrize(
    ("ranks", "kind", "blamed", "following"),
    [
        # A stopped rank makes innocent ones abort first, or raise.
        ([rank(0, code=-6), rank(1, stopped_at=NOW - 3)], "stopped", 1, (0,)),
        ([rank(0, "failed", error="ValueError: x"), rank(1, stopped_at=NOW)], "stopped", 1, (0,)),
        # A host that is lost, likewise.
        ([rank(0, code=134), rank(1, lost="host1 is lost: gone")], "host_lost", 1, (0,)),
        # 134 and -6 follow from anything that can explain them, however far it had come.
        ([rank(0, code=134, done=4), rank(1, code=-9)], "signal", 1, (0,)),
        ([rank(0, code=-6, done=4), rank(1, code=3)], "exit", 1, (0,)),
        ([rank(0, code=-6), rank(1, code=0)], "exit", 1, (0,)),
        # An error about a peer follows from the peer's death; another error does not.
        ([rank(0, "failed", 4, code=70, error=GLOO), rank(1, code=-9)], "signal", 1, (0,)),
        ([rank(0, code=-9), rank(1, "failed", 4, code=70, error="KeyError: 7")], "exception", 1,
         (0,)),
        # Nothing else explains the abort.
        ([rank(0, code=-6), rank(1)], "signal", 0, (1,)),
        ([rank(0, "failed", code=70, error=GLOO), rank(1)], "exception", 0, (1,)),
        # Somebody who is alive, behind and silent for long explains it.
        ([rank(0, code=-6, ahead=2), rank(1, "data", silent=30.0)], "hang", 1, (0,)),
        ([rank(0, code=-6, ahead=2), rank(1, "data", silent=0.1)], "signal", 0, (1,)),
        ([rank(0, "failed", 0, 0, code=70, error="FailedError: job: process 1 is missing after 60"
               " s"), rank(1, "start", 0, 0, silent=60.0)], "hang", 1, (0,)),
        # Nobody died: who had come least far, by steps, by dispatch, by phase.
        ([rank(0, silent=20.0), rank(1, done=4, silent=20.0)], "hang", 1, (0,)),
        ([rank(0, ahead=2, silent=20.0), rank(1, silent=20.0)], "hang", 1, (0,)),
        ([rank(0, "wait", silent=20.0), rank(1, "data", silent=20.0)], "hang", 1, (0,)),
        # After a step comes its save, and then the data of the next.
        ([rank(0, "checkpoint", ahead=0, silent=300.0), rank(1, "data", ahead=0, silent=300.0)],
         "hang", 0, (1,)),
        # A tie names nobody.
        ([rank(0, silent=20.0), rank(1, silent=20.0)], "hang", None, (0, 1)),
        ([rank(0, code=3), rank(1, code=-9)], "exit", None, (0, 1)),
        # Of several culprits, who had come least far.
        ([rank(0, code=3), rank(1, code=-9, done=4)], "signal", 1, (0,)),
        # Exit codes that say all by themselves.
        ([rank(0, code=-6), rank(1, "failed", code=77, error="DivergedError: nan")], "diverged",
         1, (0,)),
        ([rank(0, code=76), rank(1)], "hardware", 0, (1,)),
        ([rank(0, code=75), rank(1, code=-9)], "signal", 1, (0,)),
        # Out of memory, by the text.
        ([rank(0, "failed", code=70, error="XlaRuntimeError: RESOURCE_EXHAUSTED: 17G")], "oom", 0,
         ()),
        # A disk that is full says so too, and is no lack of memory.
        ([rank(0, "failed", code=70, error="SaveFailedError: the save of step 5 failed:"
               " RESOURCE_EXHAUSTED: No space left on device")], "storage", 0, ()),
        # It says that it failed, and does not leave.
        ([rank(0, "failed", error="KeyError: 7", silent=11.0), rank(1)], "exception", 0, (1,)),
        # Finished ranks are no followers.
        ([rank(0, "done", code=0), rank(1, code=-9)], "signal", 1, ()),
    ],
)  # fmt: skip
def test_blame(
    ranks: list[Rank], kind: str, blamed: int | None, following: tuple[int, ...]
) -> None:
    found = cause(*ranks)
    named = None if found.rank is None else found.rank.rank
    assert (found.kind, named, found.following) == (kind, blamed, following), found
    # The order in which ranks are looked at tells nothing.
    assert cause(*reversed(ranks)).detail == found.detail


def test_details_are_evidence() -> None:
    two = cause(rank(0, code=3), rank(1, code=-9, done=4))
    assert two.detail == (
        "killed by SIGKILL in wait, 4 steps complete; also rank 0: left with exit code 3 in wait,"
        " 5 steps complete"
    )
    assert two.since == NOW - 0.5
    tie = cause(rank(0, silent=20.0), rank(1, silent=20.0))
    assert tie.detail == (
        "ranks 0, 1, equally far: no sign of life for 20.0 s in wait, 5 steps complete; the limit"
        " is 10 s"
    )
    assert cause(rank(0, code=-40)).detail.startswith("killed by signal 40")


def test_a_command_that_never_reports_leaves_well_with_0() -> None:
    found = cause(rank(0, "spawned", 0, 0, code=0), rank(1, "spawned", 0, 0, code=4), speaks=False)
    assert (found.kind, found.following) == ("exit", ())
