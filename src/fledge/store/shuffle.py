"""A shuffled order that is a function of a seed and an epoch, in every version of every library."""

import numpy as np
from numpy.typing import NDArray


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The numbers below `count` in an order of their own for each seed and epoch."""
    numbers = np.array([seed, epoch], np.int64).astype(np.uint64)
    start = _mixed(_mixed(numbers[:1]) + numbers[1:])
    places: NDArray[np.uint64] = np.arange(count).astype(np.uint64)
    keys = _mixed(np.add(start, places))
    return np.argsort(keys, kind="stable")


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64: every bit of a number depends on every bit of what goes in."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
