"""Figures of a load: percentiles over answers, intervals over a few repeats."""

import functools
import math
from collections.abc import Sequence

from fledge.lab.statistics import CONFIDENCE, Interval, percentiles, t_quantile


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None where there is nothing to speak of."""
    if not values:
        return None
    return {"mean": math.fsum(values) / len(values), **percentiles(values)}


def repeats_interval(values: Sequence[float]) -> Interval | None:
    """The mean of what repeats gave, by Student's t; None where there is nothing."""
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(value=mean, low=None, high=None, num_units=1)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    reach = _t(count - 1) * spread / math.sqrt(count)
    return Interval(value=mean, low=mean - reach, high=mean + reach, num_units=count)


def ratio_of_repeats(over: Sequence[float], under: Sequence[float]) -> Interval | None:
    """How many times the one is the other, by the logarithms of pairs measured side by side."""
    pairs = [(a, b) for a, b in zip(over, under, strict=True) if a > 0 and b > 0]
    logs = repeats_interval([math.log(a / b) for a, b in pairs])
    if logs is None:
        return None
    low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
    return Interval(value=math.exp(logs.value), low=low, high=high, num_units=logs.num_units)


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's; None for fewer than three points, or where one side does not vary."""
    count = len(xs)
    if count < 3:
        return None
    mean_x, mean_y = math.fsum(xs) / count, math.fsum(ys) / count
    both = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    spread_x = math.fsum((x - mean_x) ** 2 for x in xs)
    spread_y = math.fsum((y - mean_y) ** 2 for y in ys)
    return both / math.sqrt(spread_x * spread_y) if spread_x and spread_y else None


def crossing(levels: Sequence[float], ratios: Sequence[float]) -> float | None:
    """Where a ratio that begins above 1 first falls to 1, between neighbours by their logarithms.

    None where it never does; the first level where it is never above 1.
    """
    if not ratios:
        return None
    if ratios[0] <= 1:
        return levels[0]
    steps = zip(levels, ratios, levels[1:], ratios[1:], strict=False)
    for level, ratio, next_level, next_ratio in steps:
        if next_ratio <= 1:
            part = math.log(ratio) / (math.log(ratio) - math.log(next_ratio))
            return math.exp(math.log(level) + part * (math.log(next_level) - math.log(level)))
    return None


@functools.cache
def _t(freedom: int) -> float:
    return t_quantile(0.5 + CONFIDENCE / 2, freedom)
