"""What chains on a CPU are planned by: times of rows and steps, yields, how right a head is.

All of them forget slowly, and all times are as if the machine were always equally fast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_KEPT = 1.0 - 1.0 / 24.0
_MOST_LEAST = 0.9
_NUM_BINS = 10
_BELIEVED = 4.0
"""Drafts that weigh as much as what is said of them."""

_BIN_KEPT = 1.0 - 1.0 / 512.0
_LINE_KEPT = 1.0 - 1.0 / 256.0
_FIRST_TIMED = 24
"""Cycles before speeds are told from what cycles take: that has to be known first."""

_SPEED_SHARE = 0.15
_MOST_SURPRISE = 0.5
"""Of the logarithm of what a cycle takes over what was expected: more is an interruption."""


@dataclass(frozen=True, slots=True)
class ChainOutcome:
    """What came of the chain of one request."""

    paths: Sequence[float]
    """How probable it was thought up to each draft that was verified."""

    num_accepted: int
    is_copied: bool = False
    """Whether it was copied from the text before, and the head had no say in it."""


class Rate:
    """Seconds that cycles took and tokens that they yielded, the newest counting most."""

    def __init__(self) -> None:
        self.weight = self._tokens = self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.weight = _KEPT * self.weight + 1.0
        self._tokens = _KEPT * self._tokens + num_tokens
        self._seconds = _KEPT * self._seconds + seconds

    @property
    def is_known(self) -> bool:
        """Whether cycles were timed, by a clock fine enough for them."""
        return self._tokens > 0 and self._seconds > 0

    @property
    def token_s(self) -> float:
        return self._seconds / self._tokens if self._tokens else 0.0

    @property
    def cycle_s(self) -> float:
        return self._seconds / self.weight if self.weight else 0.0

    @property
    def per_cycle(self) -> float:
        return self._tokens / self.weight if self.weight else 1.0


class Speed:
    """How slow the machine is at the moment.

    Others come and go on the same cores. What cycles with drafts took while one was there is not to
    be compared with what cycles without took when it had left.
    """

    def __init__(self) -> None:
        self._slowness = 0.0
        self._num_seen = 0

    def scale(self, seconds: float, expected_s: float) -> float:
        """What the times of a cycle are multiplied with, to be those of the usual speed."""
        self._num_seen += 1
        if self._num_seen <= _FIRST_TIMED or not (seconds > 0.0 and expected_s > 0.0):
            return 1.0
        found = math.log(seconds / expected_s)
        surprise = found - self._slowness
        believed = max(-_MOST_SURPRISE, min(surprise, _MOST_SURPRISE))
        self._slowness += _SPEED_SHARE * believed
        # An interruption in the middle of a cycle says nothing of what its rows take.
        return math.exp(-self._slowness - (surprise - believed))


class Trust:
    """How often chains are right that are given some probability, newer ones counting most."""

    def __init__(self, *, is_modest: bool = False) -> None:
        """`is_modest` says that more of them are right than the probability has it.

        So are those of a head before a greedy target, who says its best token each time and not
        only as often as it is likely. What is believed at first decides what is verified, and only
        that is learned from.
        """
        middles = [(place + 0.5) / _NUM_BINS for place in range(_NUM_BINS)]
        self._believed = [1.0 - (1.0 - one) ** 2 if is_modest else one for one in middles]
        self._offered = [0.0] * _NUM_BINS
        self._accepted = [0.0] * _NUM_BINS
        self._shares: list[float] | None = None

    def add(self, outcomes: Sequence[ChainOutcome]) -> None:
        if not outcomes:  # nothing is forgotten for it: others may be asked for long
            return
        self._shares = None
        self._offered = [_BIN_KEPT * one for one in self._offered]
        self._accepted = [_BIN_KEPT * one for one in self._accepted]
        for outcome in outcomes:
            for place, path in enumerate(outcome.paths):
                place_of = min(int(path * _NUM_BINS), _NUM_BINS - 1)
                self._offered[place_of] += 1.0
                self._accepted[place_of] += place < outcome.num_accepted

    def shares(self) -> list[float]:
        """The share that was right, from improbable to probable; what was not seen is believed."""
        if self._shares is None:
            seen = zip(self._accepted, self._offered, self._believed, strict=True)
            self._shares = [
                (right + _BELIEVED * believed) / (offered + _BELIEVED)
                for right, offered, believed in seen
            ]
        return self._shares

    def least_for(self, share: float) -> float:
        """The probability from which on chains are right at least so often."""
        shares, place = self.shares(), _NUM_BINS
        while place and shares[place - 1] >= share:
            place -= 1
        if place == _NUM_BINS:
            return _MOST_LEAST
        if place == 0:
            return 0.0
        # Between the middles of two bins a line.
        below = shares[place - 1]
        part = (share - below) / max(1e-9, shares[place] - below)
        return min((place - 0.5 + part) / _NUM_BINS, _MOST_LEAST)


class Line:
    """What a pass takes by its rows, or drafting by its steps: a line through what was seen."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5

    def add(self, count: int, seconds: float) -> None:
        terms = (1.0, count, seconds, count * count, count * seconds)
        self._sums = [_LINE_KEPT * one + term for one, term in zip(self._sums, terms, strict=True)]

    def at(self, count: int) -> float:
        """What so many take; 0 where nothing was seen."""
        weight, counts, seconds = self._sums[:3]
        if not weight:
            return 0.0
        further_s = self.further_s or 0.0
        return max(0.0, seconds / weight + (count - counts / weight) * further_s)

    @property
    def further_s(self) -> float | None:
        """What one more takes; None while passes of one size only were seen."""
        weight, counts, seconds, squares, products = self._sums
        spread = weight * squares - counts * counts
        if weight < 4 or spread < 1e-3 * weight * weight:
            return None
        return max(1e-6, (weight * products - counts * seconds) / spread)
