"""How long a pass takes, by the number of tokens in it: measured once, corrected while serving.

Between measured sizes a line is drawn; beyond the largest one time grows at least half as fast as
the number of tokens, because a curve that is still flat there will not stay flat. Real passes
correct what was measured: partly everywhere (the machine is slower today), partly around their own
size. One slow pass moves little. Corrections of sizes that are no longer seen fade, so that a size
once thought too slow is tried again some day.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fledge.contracts.errors import ArtifactError
from fledge.engine.monotone import rising

Array = NDArray[np.float64]

_LARGEST_SURPRISE = 0.25
"""What one pass may claim to deviate, as a logarithm: a stutter is not a trend."""
_COMMON_RATE = 0.05
_LOCAL_RATE = 0.25
_FADING = 1 / 1024


class PassCurve:
    """Seconds against tokens for one kind of pass."""

    def __init__(self, tokens: Sequence[int], seconds: Sequence[float]) -> None:
        self._tokens_K = np.array(tokens, dtype=float)
        self._measured_K = rising(np.array(seconds, dtype=float))
        self._common = 0.0
        self._local_K = np.zeros(len(tokens))
        self._correct()

    def seconds(self, num_tokens: float | Array) -> Array:
        """Expected time of passes of these sizes."""
        sizes = np.asarray(num_tokens, dtype=float)
        inside = np.interp(sizes, self._tokens_K, self._seconds_K)
        result: Array = inside + self._slope * (sizes - self._tokens_K[-1]).clip(min=0.0)
        return result

    def refine(self, num_tokens: int, seconds: float) -> None:
        """A pass of this size has taken so long."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        expected = max(float(self.seconds(num_tokens)), 1e-9)
        surprise = np.clip(math.log(seconds / expected), -_LARGEST_SURPRISE, _LARGEST_SURPRISE)
        nearness_K = self._nearness(num_tokens)
        self._local_K *= 1.0 - _FADING * (1.0 - nearness_K)
        self._local_K += _LOCAL_RATE * surprise * nearness_K
        self._common += _COMMON_RATE * surprise
        self._correct()

    def to_json(self) -> dict[str, list[float]]:
        """What was measured; corrections belong to the day they were made."""
        return {"tokens": self._tokens_K.tolist(), "seconds": self._measured_K.tolist()}

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

    def _nearness(self, num_tokens: int) -> Array:
        """1 for the measured sizes around this one, shared between them by distance."""
        upper = int(np.searchsorted(self._tokens_K, num_tokens))
        nearness_K = np.zeros(len(self._tokens_K))
        if upper in (0, len(self._tokens_K)):
            nearness_K[min(upper, len(self._tokens_K) - 1)] = 1.0
            return nearness_K
        low, high = self._tokens_K[upper - 1], self._tokens_K[upper]
        share = (num_tokens - low) / (high - low)
        nearness_K[upper - 1], nearness_K[upper] = 1.0 - share, share
        return nearness_K

    def _correct(self) -> None:
        self._seconds_K = self._measured_K * np.exp(self._common + self._local_K)
        last_tokens, last_s = self._tokens_K[-1], self._seconds_K[-1]
        half_s = float(np.interp(last_tokens / 2, self._tokens_K, self._seconds_K))
        steepest = (last_s - half_s) / (last_tokens / 2)
        self._slope = max(steepest, last_s / last_tokens / 2)


class PassTimes:
    """Times of target and head passes on this machine."""

    def __init__(
        self, target: PassCurve, head: PassCurve | None = None, *, context_s: float = 0.0
    ) -> None:
        self.target = target
        self.head = head
        self.context_s = context_s
        """What each cached token adds to a target pass that attends to it."""

    def target_s(self, num_tokens: int, context_tokens: int = 0) -> float:
        """Expected time of a target pass over requests with so many cached tokens in all."""
        return float(self.target.seconds(num_tokens)) + self.context_s * context_tokens

    def head_s(self, num_tokens: int) -> float:
        """Expected time of one head pass; nothing without a head."""
        return 0.0 if self.head is None else float(self.head.seconds(num_tokens))

    def refine(self, num_tokens: int, seconds: float, context_tokens: int = 0) -> None:
        """A target pass has taken so long."""
        own_s = seconds - self.context_s * context_tokens
        # Cached tokens cannot have cost nearly everything: then what they cost is misjudged.
        self.target.refine(num_tokens, max(own_s, 0.1 * seconds))

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target.to_json(),
            "head": None if self.head is None else self.head.to_json(),
            "context_s": self.context_s,
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
        # The first pass of a size allocates, compiles or wakes the device; it is not counted.
        timings = [measure(size)]
        spent_s += timings[0]
        for _ in range(3):
            if len(timings) > 1 and spent_s > budget_s:
                break
            timings.append(measure(size))
            spent_s += timings[-1]
        sizes.append(size)
        seconds.append(float(np.median(timings[1:])))
        if spent_s > budget_s and len(sizes) > 2:
            break
    return PassCurve(sizes, seconds)
