"""Whether the drafter has become better or worse than it was.

Averages over many cycles are steady but slow. A short average is watched beside the long one: when
the two part by more than chance explains, what was learned before is outdated.
"""

import math

_SHORT = 12.0
_LONG = 256.0
"""Requests' worth of values that the two averages reach back."""
_FEW = 6.0
_ENOUGH = 12.0
"""Values before one is called unusual, and before anything is called a change."""
_SURE = 4.0
_SUSPICIOUS = 2.0
"""Standard errors between the averages, and between one value and the long average."""


class DriftWatch:
    """A short and a long average of the same values."""

    def __init__(self) -> None:
        self._count = 0.0
        self._long = 0.0
        self._short = 0.0
        self._variance = 0.0
        """Of one request's value."""

        self.is_suspicious = False
        """The newest value was unusual."""

    def observe(self, value: float, count: int) -> bool:
        """Take in the mean of `count` requests; returns whether things have changed for good."""
        if self._count == 0.0:
            self._long = self._short = value
        deviation = value - self._long
        error = math.sqrt(self._variance / count)
        is_enough = self._count >= _ENOUGH
        self.is_suspicious = self._count >= _FEW and abs(deviation) > _SUSPICIOUS * error
        self._count += count
        self._short += (1.0 - math.exp(-count / _SHORT)) * (value - self._short)
        # A change that is real may not hide itself by widening what is called usual.
        unusual = min(count * deviation * deviation, 9.0 * self._variance + 0.01)
        rate = max(1.0 - math.exp(-count / _LONG), count / (self._count + count))
        self._long += rate * deviation
        self._variance += rate * (unusual - self._variance)
        gap_error = math.sqrt(self._variance / max(2.0 * _SHORT, count))
        if is_enough and abs(self._short - self._long) > _SURE * gap_error:
            self._long = self._short
            self._count = _ENOUGH
            return True
        return False
