"""How long a pass takes, by the number of tokens in it: measured once, corrected while serving.

Between measured sizes a line is drawn; beyond the largest one time grows at least half as fast as
the number of tokens, because a curve that is still flat there will not stay flat. Real passes
correct what was measured: partly everywhere (the machine is slower today), partly around their own
size; sizes beyond the measured ones have corrections of their own as soon as they are seen, and
until then that of the largest below them. One slow pass moves little. Corrections of sizes that are
no longer seen fade, so that a size once thought too slow is tried again some day.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fledge.contracts.errors import ArtifactError
from fledge.engine.context_cost import ContextCost
from fledge.engine.monotone import rising

Array = NDArray[np.float64]

_FIRST_SPREAD = 0.1
_SMALLEST_SPREAD = 0.01
_SPREAD_RATE = 0.1
_BELIEVED = 3.0
"""Usual deviations that one pass may claim at most: a stutter is not a trend."""
_COMMON_RATE = 0.05
_LOCAL_RATE = 0.2
_FIRST_RATE = 0.8
"""How far the first passes of a size move it: what is measured at the start may be far off."""
_NUDGES_PER_FADING = 256
_FADING = 1 / 16
_BEYOND = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Times the largest measured size, sizes that real passes correct too."""
_NOTICED = 0.01
"""Share of a pass by which cached tokens have to be misjudged before that is put right."""


class PassCurve:
    """Seconds against tokens for one kind of pass."""

    def __init__(self, tokens: Sequence[int], seconds: Sequence[float]) -> None:
        self._tokens = [float(number) for number in tokens]
        self._measured: list[float] = rising(np.array(seconds, dtype=float)).tolist()
        self._num_measured = len(tokens)
        slope = _steepness(self._tokens, self._measured)
        for times in _BEYOND:
            self._tokens.append(round(times * tokens[-1]))
            rise_s = slope * (self._tokens[-1] - tokens[-1])
            self._measured.append(self._measured[self._num_measured - 1] + rise_s)
        self._local = [0.0] * len(self._tokens)
        self._num_seen = [0.0] * len(self._tokens)
        self._common: float = 1.0
        self._spread = _FIRST_SPREAD
        self._num_nudges = 0
        self._seconds: list[float] = list(self._measured)
        """Measured and corrected for its own size, not yet for what is common to all."""
        self._slope = _steepness(self._tokens, self._seconds)

    def at(self, num_tokens: float) -> float:
        """Expected time of one pass."""
        tokens, seconds = self._tokens, self._seconds
        upper = bisect_left(tokens, num_tokens)
        if upper == 0:
            return self._common * seconds[0]
        if upper == len(tokens):
            return self._common * (seconds[-1] + self._slope * (num_tokens - tokens[-1]))
        share = (num_tokens - tokens[upper - 1]) / (tokens[upper] - tokens[upper - 1])
        rise = seconds[upper] - seconds[upper - 1]
        return self._common * (seconds[upper - 1] + share * rise)

    def seconds(self, num_tokens: Array) -> Array:
        """Expected times of passes of these sizes."""
        inside = np.interp(num_tokens, self._tokens, self._seconds)
        beyond = self._slope * (num_tokens - self._tokens[-1]).clip(min=0.0)
        result: Array = self._common * (inside + beyond)
        return result

    def refine(self, num_tokens: int, seconds: float) -> None:
        """A pass of this size has taken so long."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        self.nudge(num_tokens, math.log(seconds / max(self.at(num_tokens), 1e-9)))

    def nudge(self, num_tokens: float, surprise: float, weight: float = 1.0) -> None:
        """Time around this size was off by a factor, given as a logarithm."""
        largest = _BELIEVED * self._spread
        step = weight * min(max(surprise, -largest), largest)
        # A change that stays widens what is believed within a few passes.
        deviation = min(abs(surprise), _BELIEVED * largest)
        self._spread += _SPREAD_RATE * weight * (deviation - self._spread)
        self._spread = max(self._spread, _SMALLEST_SPREAD)
        self._common *= math.exp(_COMMON_RATE * step)
        for place, nearness in self._nearness(num_tokens):
            rate = max(_LOCAL_RATE, _FIRST_RATE / (1.0 + self._num_seen[place]))
            self._num_seen[place] += weight * nearness
            self._move(place, self._local[place] + rate * step * nearness)
            self._respect_larger_passes(place)
            self._take_along(place)
        self._num_nudges += 1
        if self._num_nudges % _NUDGES_PER_FADING == 0:
            for place, local in enumerate(self._local):
                self._move(place, local * (1.0 - _FADING))
        self._slope = _steepness(self._tokens, self._seconds)

    def shift(self, seconds_by_tokens: Mapping[int, float]) -> None:
        """Passes of these sizes take so much more than was thought, for a reason that is known."""
        sums = [[0.0, 0.0] for _ in self._tokens]
        for num_tokens, seconds in seconds_by_tokens.items():
            for place, nearness in self._nearness(num_tokens):
                sums[place][0] += nearness
                sums[place][1] += nearness * seconds
        for place, (weight, seconds) in enumerate(sums):
            if weight > 0:
                own_s = self._seconds[place]
                shifted_s = max(own_s + seconds / weight / self._common, 0.1 * own_s)
                self._move(place, math.log(shifted_s / self._measured[place]))
                self._take_along(place)
        self._slope = _steepness(self._tokens, self._seconds)

    def _take_along(self, moved: int) -> None:
        """Sizes beyond the measured ones go with the largest that was seen below them."""
        if moved < self._num_measured - 1:
            return
        for place in range(moved + 1, len(self._tokens)):
            if self._num_seen[place] > 0:
                break
            self._move(place, self._local[moved])

    def _respect_larger_passes(self, moved: int) -> None:
        """A pass takes no longer than a larger one that was seen more often."""
        seconds, num_seen = self._seconds, self._num_seen
        for place in range(moved + 1, len(seconds)):
            if num_seen[place] > num_seen[moved] + 1.0 and seconds[place] < seconds[moved]:
                self._move(moved, math.log(seconds[place] / self._measured[moved]))
        for place in range(moved):
            if num_seen[moved] > num_seen[place] + 1.0 and seconds[moved] < seconds[place]:
                self._move(place, math.log(seconds[moved] / self._measured[place]))

    def fastest(self, num_tokens: Array) -> Array:
        """How fast passes of these sizes may turn out to be: few were seen, or none."""
        doubt = [_FIRST_SPREAD / (1.0 + count) for count in self._num_seen]
        result: Array = self.seconds(num_tokens) * (
            1.0 - np.interp(num_tokens, self._tokens, doubt)
        )
        return result

    def num_seen(self, num_tokens: float) -> float:
        """How many real passes of about this size have been taken in."""
        return sum(share * self._num_seen[place] for place, share in self._nearness(num_tokens))

    def to_json(self) -> dict[str, list[float]]:
        """What was measured; corrections belong to the day they were made."""
        count = self._num_measured
        return {"tokens": self._tokens[:count], "seconds": self._measured[:count]}

    @classmethod
    def from_json(cls, document: Any) -> "PassCurve":
        try:
            tokens = [int(number) for number in document["tokens"]]
            seconds = [float(number) for number in document["seconds"]]
        except (TypeError, KeyError, ValueError) as error:
            raise ArtifactError("pass times are not lists of numbers; measure again.") from error
        in_order = all(a < b for a, b in zip([0, *tokens], tokens, strict=False))
        positive = all(math.isfinite(number) and number > 0 for number in seconds)
        if not tokens or len(tokens) != len(seconds) or not in_order or not positive:
            raise ArtifactError(
                f"pass times for {tokens} tokens are {seconds} s, which cannot be; measure again."
            )
        return cls(tokens, seconds)

    def _move(self, place: int, local: float) -> None:
        self._local[place] = local
        self._seconds[place] = self._measured[place] * math.exp(local)

    def _nearness(self, num_tokens: float) -> tuple[tuple[int, float], ...]:
        """The measured sizes around this one, 1 shared between them by distance."""
        upper = bisect_left(self._tokens, num_tokens)
        if upper in (0, len(self._tokens)):
            return ((min(upper, len(self._tokens) - 1), 1.0),)
        low, high = self._tokens[upper - 1], self._tokens[upper]
        share = (num_tokens - low) / (high - low)
        return ((upper - 1, 1.0 - share), (upper, share))


def _steepness(tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """Seconds per token beyond the largest size."""
    half = bisect_left(tokens, tokens[-1] / 2)
    rise_s = seconds[-1] - seconds[half]
    steepness = rise_s / (tokens[-1] - tokens[half]) if rise_s > 0 else 0.0
    return max(steepness, seconds[-1] / tokens[-1] / 2)


class PassTimes:
    """Times of target and head passes on this machine."""

    def __init__(
        self, target: PassCurve, head: PassCurve | None = None, *, context_s: float = 0.0
    ) -> None:
        self.target = target
        self.head = head
        self.context_s = context_s
        """What each cached token adds to a target pass that attends to it."""

        self._measured_context_s = context_s
        self._context = ContextCost(context_s)

    def target_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        """Expected time of a target pass over requests with so many cached tokens in all."""
        return self.target.at(num_tokens) + self.context_s * context_tokens

    def head_s(self, num_tokens: int) -> float:
        """Expected time of one head pass; nothing without a head."""
        return 0.0 if self.head is None else self.head.at(num_tokens)

    def refine(self, num_tokens: int, seconds: float, context_tokens: int = 0) -> None:
        """A target pass has taken so long."""
        self._context.observe(num_tokens, seconds, context_tokens)
        misjudged_s = self._context.token_s - self.context_s
        if abs(misjudged_s) * context_tokens > _NOTICED * seconds:
            self._judge_context(misjudged_s)
        own_s = seconds - self.context_s * context_tokens
        # Cached tokens cannot have cost nearly everything: then what they cost is misjudged.
        self.target.refine(num_tokens, max(own_s, 0.1 * seconds))

    def _judge_context(self, misjudged_s: float) -> None:
        """Cached tokens cost so much more; sizes that were seen had that counted as their own."""
        self.context_s += misjudged_s
        usual = self._context.usual_contexts().items()
        self.target.shift({size: -misjudged_s * tokens for size, tokens in usual})

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target.to_json(),
            "head": None if self.head is None else self.head.to_json(),
            "context_s": self._measured_context_s,
        }

    @classmethod
    def from_json(cls, document: Any) -> "PassTimes":
        try:
            target, head = document["target"], document["head"]
            context_s = float(document["context_s"])
        except (TypeError, KeyError, ValueError) as error:
            raise ArtifactError("pass times are not a complete document; measure again.") from error
        if not (math.isfinite(context_s) and context_s >= 0):
            raise ArtifactError(f"a cached token costs {context_s} s, which cannot be.")
        head_curve = None if head is None else PassCurve.from_json(head)
        return cls(PassCurve.from_json(target), head_curve, context_s=context_s)


def measured_sizes(max_tokens: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to and including `max_tokens`."""
    sizes = {max_tokens}
    for power in range(max_tokens.bit_length()):
        sizes |= {2**power, 2**power * 3 // 2}
    return sorted(size for size in sizes if size <= max_tokens)


def measure_curve(
    measure: Callable[[int], float], *, max_tokens: int, budget_s: float
) -> PassCurve:
    """Time passes of rising size until the largest is reached or the time is used up."""
    sizes: list[int] = []
    seconds: list[float] = []
    spent_s = 0.0
    for size in measured_sizes(max_tokens):
        # The first pass of a size allocates, compiles or wakes the device; it is not counted, and
        # costs the budget no more than the second.
        timings = [measure(size)]
        for _ in range(3):
            if len(timings) > 1 and spent_s > budget_s:
                break
            timings.append(measure(size))
            spent_s += timings[-1] * (2 if len(timings) == 2 else 1)
        sizes.append(size)
        seconds.append(float(np.median(timings[1:])))
        if spent_s > budget_s and len(sizes) > 2:
            break
    return PassCurve(sizes, seconds)
