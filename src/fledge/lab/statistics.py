"""How sure a measured figure is: bootstrap intervals, paired comparisons, percentiles.

A *unit* is what was measured together and could have been another one: a prompt, or a group of
prompts that were answered at the same time. Units are drawn anew with replacement; what belongs to
one unit (with the head and without it, all repeats) stays together, so the comparison is paired.
Tasks are strata: each is drawn from its own units.

An interval is the figure plus and minus Student's t times the standard error that the draws show.
Shares of the draws themselves would make it too short where units are few. For the same reason the
error of each stratum grows by sqrt(n / (n - 1)).

Legend: R draws, N units, C columns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Statistic = Callable[[Array], Array]
"""From sums over units, one row for each draw, to one figure for each draw."""

DRAWS = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with its confidence interval; the bounds are None where nothing can be said."""

    value: float
    low: float | None
    high: float | None
    num_units: int

    def to_json(self) -> dict[str, float | int | None]:
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "num_units": self.num_units,
        }

    def excludes(self, value: float) -> bool:
        """Whether the interval is known and the value lies outside it."""
        if self.low is None or self.high is None:
            return False
        return not self.low <= value <= self.high


def bootstrap(
    strata: Sequence[Array],
    statistic: Statistic,
    *,
    seed: int = 0,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
) -> Interval:
    """The mean over strata of a statistic of sums, with its interval.

    Each stratum is an array of units by columns, for instance tokens and seconds of each prompt
    with the head and without.
    """
    assert strata, "there is nothing to draw from"
    counts = [len(units_NC) for units_NC in strata]
    values = [float(statistic(units_NC.sum(axis=0, keepdims=True))[0]) for units_NC in strata]
    value = float(np.mean(values))
    if min(counts) < 2:
        return Interval(value=value, low=None, high=None, num_units=sum(counts))
    source = np.random.default_rng(seed)
    deviations_R = np.zeros(draws)
    for units_NC, count, own in zip(strata, counts, values, strict=True):
        weights_RN = source.multinomial(count, np.full(count, 1 / count), size=draws)
        drawn_R = statistic(weights_RN @ units_NC)
        deviations_R += (drawn_R - own) * math.sqrt(count / (count - 1))
    error = float(np.sqrt(np.mean(deviations_R**2))) / len(strata)
    reach = error * t_quantile(0.5 + confidence / 2, sum(counts) - len(counts))
    return Interval(value=value, low=value - reach, high=value + reach, num_units=sum(counts))


def mean_interval(
    values: Sequence[float],
    *,
    seed: int = 0,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
) -> Interval:
    """The mean of independent values."""
    units_NC = np.array([[value, 1.0] for value in values])
    return bootstrap([units_NC], _mean, seed=seed, draws=draws, confidence=confidence)


def _mean(sums_RC: Array) -> Array:
    return sums_RC[:, 0] / sums_RC[:, 1]


def ratio_interval(
    pairs: Mapping[str, Sequence[tuple[float, float, float, float]]],
    *,
    seed: int = 0,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
) -> Interval:
    """A speed-up averaged over tasks: (amount, seconds) with, then (amount, seconds) without."""
    strata = [np.array(units, dtype=float) for units in pairs.values()]
    return bootstrap(strata, rate_ratio, seed=seed, draws=draws, confidence=confidence)


def rate_ratio(sums_RC: Array) -> Array:
    """Columns: amount and seconds with the head, amount and seconds without it."""
    return (sums_RC[:, 0] / sums_RC[:, 1]) / (sums_RC[:, 2] / sums_RC[:, 3])


def rate_ratio_difference(sums_RC: Array) -> Array:
    """One head's rate ratio less another's: eight columns, as `rate_ratio` has them, of each."""
    return rate_ratio(sums_RC[:, :4]) - rate_ratio(sums_RC[:, 4:])


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share (0 to 1) of the values lies, between two by line."""
    assert len(values) > 0, "there are no values"
    return float(np.quantile(np.asarray(values, dtype=float), share))


def percentiles(
    values: Sequence[float], shares: Sequence[float] = (0.5, 0.9, 0.95, 0.99)
) -> dict[str, float]:
    """By name: `p50`, `p90` ..."""
    return {f"p{share * 100:g}": percentile(values, share) for share in shares}


@lru_cache
def t_quantile(share: float, freedom: int) -> float:
    """Quantile of Student's t, for shares above one half.

    With x = sqrt(f) tan(a) its density is proportional to cos(a)^(f-1), which is summed.
    """
    assert 0.5 <= share < 1
    assert freedom >= 1
    angles = np.linspace(0, math.pi / 2, 20_001)
    heights = np.cos(angles) ** (freedom - 1)
    sums = np.concatenate([[0.0], np.cumsum(heights[1:] + heights[:-1])])
    angle = float(np.interp(2 * share - 1, sums / sums[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)
