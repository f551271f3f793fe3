"""NumPy's and Python's random states."""

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrel.checkpoint import host_random
from jaxrel.exit_codes import DataRefusedError, UsageError


@pytest.fixture(autouse=True)
def _leave_no_trace():
    numpy_state, python_state = np.random.get_state(), random.getstate()
    yield
    np.random.set_state(numpy_state)
    random.setstate(python_state)


def draw(count: int) -> list[float]:
    """An odd number of normal variates leaves one cached in either generator."""
    return [
        value
        for _ in range(count)
        for value in (np.random.normal(), np.random.random(), random.gauss(0, 1), random.random())
    ]


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 700))
def test_what_is_restored_goes_on_as_before(seed: int, count: int) -> None:
    np.random.seed(seed)
    random.seed(seed)
    draw(count)
    captured = json.loads(json.dumps(host_random.capture()))
    expected = draw(9)
    np.random.seed(1)
    random.seed(1)
    assert host_random.restore(captured, seed=0, step=0) == "restored"
    assert draw(9) == expected


def test_another_number_of_processes_derives_from_seed_process_and_step() -> None:
    captured = host_random.capture() * 2
    drawn = []
    for seed, step in [(1, 2), (1, 2), (1, 3), (2, 2)]:
        assert host_random.restore(captured, seed=seed, step=step) == "derived"
        drawn.append(draw(3))
    assert drawn[0] == drawn[1]
    host_random.derive(1, 1, 2)
    assert len({tuple(values) for values in [*drawn, draw(3)]}) == 4
    host_random.derive(1, 0, 2)
    assert draw(3) == drawn[0]
    # Fixed for all time: a run resumed by a later version derives the same.
    host_random.derive(0, 0, 0)
    assert [np.random.randint(1000), random.randrange(1000)] == [743, 756]


@pytest.mark.parametrize("states", [None, [], {}, ["@@"], ["AAAA"], [5]])
def test_damaged_states_are_refused(states: object) -> None:
    before = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    with pytest.raises(DataRefusedError, match="host random states of the checkpoint are damaged"):
        host_random.restore(states, seed=0, step=0)
    after = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    assert after == before


def test_another_generator_is_refused() -> None:
    numpy_random: Any = np.random  # whose stubs lack what follows
    own = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(np.random.PCG64(0))
    try:
        with pytest.raises(UsageError, match="global generator is PCG64"):
            host_random.capture()
    finally:
        numpy_random.set_bit_generator(own)
