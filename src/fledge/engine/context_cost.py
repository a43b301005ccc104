"""What each cached token adds to a pass, learned from passes of the same size.

Requests grow while the number of rows stays, so passes of one size tell what their cached tokens
cost, whatever the rows take. What was measured at the start counts like some of them.
"""

from dataclasses import dataclass

_MEASURED_WEIGHT = 8.0 * 8192.0**2
"""Squared tokens, as of passes around a mean: what the measurement at the start is worth."""
_LONGEST_MEMORY = 64.0
_KEPT = 1.0 - 1.0 / 1024.0
_MOST_SIZES = 128
_BELIEVED = 0.2
"""How far off the mean of its size a pass may be: a stutter says nothing of cached tokens."""
_FEW = 4.0


@dataclass(slots=True)
class _Size:
    count: float
    context_tokens: float
    seconds: float


class ContextCost:
    """Seconds for each cached token."""

    def __init__(self, measured_s: float) -> None:
        self._products = measured_s * _MEASURED_WEIGHT
        self._squares = _MEASURED_WEIGHT
        self._measured = self._products, self._squares
        self._sizes: dict[int, _Size] = {}

    @property
    def token_s(self) -> float:
        """What one cached token adds."""
        return max(0.0, self._products / self._squares)

    def observe(self, num_tokens: int, seconds: float, context_tokens: int) -> None:
        """A pass over so many rows has taken so long."""
        size = self._sizes.get(num_tokens)
        if size is None:
            if len(self._sizes) >= _MOST_SIZES:
                self._sizes.pop(next(iter(self._sizes)))
            self._sizes[num_tokens] = _Size(1.0, float(context_tokens), seconds)
            return
        if size.count < _FEW:
            # Nobody knows yet which of the first passes stuttered: the shorter ones are usual.
            size.seconds = min(size.seconds, (1.0 + _BELIEVED) * seconds)
        most_off = _BELIEVED * size.seconds
        tokens_off, seconds_off = context_tokens - size.context_tokens, seconds - size.seconds
        seconds_off = min(max(seconds_off, -most_off), most_off)
        weight = size.count / (size.count + 1.0)
        # What was measured is not forgotten: it is all there is where contexts are short.
        self._products = self._faded(self._products, 0) + weight * tokens_off * seconds_off
        self._squares = self._faded(self._squares, 1) + weight * tokens_off * tokens_off
        size.count = min(size.count + 1.0, _LONGEST_MEMORY)
        size.context_tokens += tokens_off / size.count
        size.seconds += seconds_off / size.count

    def usual_contexts(self) -> dict[int, float]:
        """Cached tokens that passes of each size have had lately."""
        return {num_tokens: size.context_tokens for num_tokens, size in self._sizes.items()}

    def _faded(self, total: float, which: int) -> float:
        return self._measured[which] + _KEPT * (total - self._measured[which])
