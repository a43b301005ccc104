"""Machines made of numbers: how long passes of a target and of a head take, by their tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fledge.engine.pass_times import PassCurve, PassTimes, measured_sizes

Array = NDArray[np.float64]

MAX_PASS_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Machine:
    """True times in milliseconds by tokens in the pass."""

    name: str
    target: Callable[[Array], Array]
    head: Callable[[Array], Array]
    other_ms: float = 0.1

    def pass_times(self, distortion: float = 0.0, seed: int = 0) -> PassTimes:
        """What a measurement at the start would have said, wrong by a random factor per size."""
        random = np.random.default_rng(seed)
        sizes = measured_sizes(MAX_PASS_TOKENS)

        def curve(true: Callable[[Array], Array]) -> PassCurve:
            wrong = np.exp(distortion * random.standard_normal(len(sizes)))
            return PassCurve(sizes, 1e-3 * true(np.array(sizes, dtype=float)) * wrong)

        return PassTimes(curve(self.target), curve(self.head))


def _table(sizes: list[int], milliseconds: list[float]) -> Callable[[Array], Array]:
    slope = (milliseconds[-1] - milliseconds[-2]) / (sizes[-1] - sizes[-2])

    def interpolate(tokens: Array) -> Array:
        beyond = np.maximum(0.0, tokens - sizes[-1]) * slope
        return np.interp(tokens, sizes, milliseconds) + beyond

    return interpolate


H200_8B = _table(
    [1, 8, 32, 64, 128, 192, 256, 384, 512],
    [4.71, 4.91, 5.07, 5.21, 5.75, 6.94, 8.28, 11.65, 14.34],
)
_CPU_135M = _table([1, 2, 4, 8, 16, 32], [60.0, 95.0, 93.0, 100.0, 147.0, 198.0])
MACHINES = (
    Machine("memory-bound, cheap head", H200_8B, lambda n: 0.1 + 0.06 * H200_8B(n)),
    Machine("memory-bound, dear head", H200_8B, lambda n: 0.2 + 0.25 * H200_8B(n)),
    Machine("launch-bound", lambda n: 0.9 + 0.0005 * n, lambda n: 0.15 + 0.0002 * n, 0.2),
    Machine("cpu with offset", _CPU_135M, lambda n: 2.0 + 0.08 * _CPU_135M(n)),
    Machine("linear from the first token", lambda n: 5.0 + 4.0 * n, lambda n: 1.0 + 0.2 * n),
    Machine("linear, dear head", lambda n: 5.0 + 4.0 * n, lambda n: 3.0 + 0.6 * n),
)
