"""The random states of the host: NumPy's legacy global generator and Python's `random`.

Code that draws from them (augmentation, a user's data transform) resumes where it stopped
only if they are saved, one for each process.
"""

import base64
import random
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrel.exit_codes import DataRefusedError, UsageError

_WORDS = 624  # of a Mersenne Twister, which both of them are
_LENGTH = 2 * (_WORDS + 4)  # and its position, whether a normal variate is cached, that variate


def capture() -> list[str]:
    """The states of all processes, in their order, as JSON strings. Collective."""
    states = np.atleast_2d(multihost_utils.process_allgather(_words()))
    return [base64.b64encode(words.astype("<u4").tobytes()).decode() for words in states]


def restore(states: Any, *, seed: int, step: int) -> Literal["restored", "derived"]:
    """Set this process's states from what `capture` gave.

    If the number of processes is another one than then, they are derived from (seed,
    process, step) instead, which the caller puts on record. Raises DataRefusedError if
    `states` is not what `capture` gives.
    """
    if not isinstance(states, list) or not states:
        raise DataRefusedError("the host random states of the checkpoint are damaged")
    if len(states) != jax.process_count():
        derive(seed, jax.process_index(), step)
        return "derived"
    try:
        words = np.frombuffer(base64.b64decode(states[jax.process_index()], validate=True), "<u4")
        _set(words)
    except (TypeError, ValueError) as error:
        raise DataRefusedError(
            f"the host random states of the checkpoint are damaged: {error}"
        ) from error
    return "restored"


def derive(seed: int, process: int, step: int) -> None:
    """Seed both generators from three numbers, each at least 0."""
    numpy_seed, python_seed = np.random.SeedSequence([seed, process, step]).spawn(2)
    np.random.seed(numpy_seed.generate_state(8))
    random.seed(int.from_bytes(python_seed.generate_state(8).tobytes(), "little"))


def _words() -> np.ndarray:
    """Both states: uint32 [_LENGTH]."""
    state: Any = np.random.get_state(legacy=False)
    kind, twister = state["bit_generator"], state["state"]
    if kind != "MT19937":
        raise UsageError(f"NumPy's global generator is {kind}; only MT19937 can be saved")
    normal = state["gauss"] if state["has_gauss"] else None
    _, (*python_keys, python_position), python_normal = random.getstate()
    return np.concatenate(
        [
            _pack(twister["key"], twister["pos"], normal),
            _pack(python_keys, python_position, python_normal),
        ]
    )


def _pack(keys: Any, position: int, normal: float | None) -> np.ndarray:
    cached = np.array([normal or 0.0], "<f8").view("<u4")
    return np.concatenate([keys, [position, normal is not None], cached]).astype(np.uint32)


def _unpack(words: np.ndarray) -> tuple[np.ndarray, int, float | None]:
    keys, (position, has_normal), cached = np.split(words, [_WORDS, _WORDS + 2])
    return keys, int(position), float(cached.view("<f8")[0]) if has_normal else None


def _set(words: np.ndarray) -> None:
    if words.shape != (_LENGTH,):
        raise ValueError(f"{words.size} words, expected {_LENGTH}")
    keys, position, normal = _unpack(words[: _LENGTH // 2])
    np.random.set_state(("MT19937", keys, position, int(normal is not None), normal or 0.0))
    keys, position, normal = _unpack(words[_LENGTH // 2 :])
    random.setstate((3, (*map(int, keys), position), normal))
