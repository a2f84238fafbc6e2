"""Random numbers as a pure function of (seed, position), so that batching cannot change
them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def uniform(seeds: Sequence[int], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """A number in [0, 1) for each seed and position; any integer is a seed."""
    return uniform_of(np.array([seed & _MASK for seed in seeds], dtype=np.uint64), positions)


def uniform_of(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """`uniform` for an array of 64-bit seeds."""
    with np.errstate(over="ignore"):
        stream = _mixed(seeds + _GOLDEN)
        drawn = _mixed(stream + positions.astype(np.uint64) * _GOLDEN)
    # The upper 24 bits, which a float32 represents exactly, so the result is never 1.0.
    return (drawn >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
