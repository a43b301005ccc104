"""How many places a batch is given: few sizes are captured, and a new one has to be worth it.

Capturing a size takes as long as many of its cycles. So requests share a larger batch that was
captured, and what that costs beyond a batch of their own is added up. Once it has cost as much as a
capture would, the capture is made: at worst that is twice what knowing the future would have cost,
and a batch that only passes through a size on its way down never pays for it.
"""

from collections.abc import Callable

import numpy as np

from fledge.engine.graphs import Graphs
from fledge.engine.steady_batch import batch_size
from fledge.engine.steady_flight import Collected
from fledge.engine.steady_runs import SteadyRuns

_LIKELY_SHARE = 0.25
"""Of a cycle's time, what shrinks with the batch where nothing smaller was timed: reading weights
takes most of it."""

_RATE = 0.2
_FEW_PLACES, _MOST_TIMES = 16, 4
"""Places that cost next to nothing, and over those of a size of their own, what a batch that begins
may have."""
_KINDS_PER_SIZE = 2
"""Drafting and verifying."""


class SteadySizes:
    """Which size so many requests go to."""

    def __init__(self, runs: SteadyRuns, graphs: Graphs) -> None:
        self._runs, self._graphs = runs, graphs
        self._seconds: dict[tuple[bool, int], float] = {}
        self._lost_s: dict[tuple[bool, int], float] = {}

    def pick(self, num_requests: int, *, is_drafting: bool, now: int = 0) -> int:
        """Places for so many requests that have `now` places, 0 for none."""
        own = batch_size(max(1, num_requests))
        ready = self._runs.sizes(is_drafting=is_drafting)
        if not self._graphs.is_capturing or own in ready or self._is_due(own, is_drafting):
            return own
        larger = min((size for size in ready if size >= num_requests), default=0)
        # A batch that shrinks may be about to end; one that begins should not pay for many places.
        if larger and (now >= num_requests or larger <= max(_FEW_PLACES, _MOST_TIMES * own)):
            return larger
        return now if now >= num_requests else own

    def observe(self, got: Collected) -> None:
        """What a cycle has taken, if it was replayed."""
        one = got.started
        if one.is_reading or one.is_cold or not self._graphs.is_capturing:
            return
        size, is_drafting = one.load.num_places, not one.plan.is_plain
        key, seconds = (is_drafting, size), got.draft_s + got.target_s
        before = self._seconds.get(key, seconds)
        self._seconds[key] = before + _RATE * (seconds - before)
        if (own := batch_size(max(1, len(got.said)))) < size:
            lost_s = self._seconds[key] - self._expected_s(own, size, is_drafting)
            key = is_drafting, own
            self._lost_s[key] = self._lost_s.get(key, 0.0) + max(0.0, lost_s)

    def plain_s(self, size: int) -> float:
        """What a cycle of a size without drafts takes; 0 while none was timed."""
        return self._seconds.get((False, size), 0.0)

    def _is_due(self, own: int, is_drafting: bool) -> bool:
        """Whether larger batches have cost what capturing this size would have."""
        lost_s = self._lost_s.get((is_drafting, own), 0.0)
        return lost_s > _KINDS_PER_SIZE * self._graphs.cost_s

    def _expected_s(self, own: int, size: int, is_drafting: bool) -> float:
        """A cycle of a size that was perhaps never run, from those around it."""
        known = {s: t for (drafts, s), t in self._seconds.items() if drafts == is_drafting}
        if min(known) >= size:
            return known[size] * (1.0 - _LIKELY_SHARE * (1.0 - own / size))
        sizes = sorted(known)
        return float(np.interp(own, sizes, [known[one] for one in sizes]))


SizeChoice = Callable[[int, int], int]
"""From how many requests there are, and how many places they have, to how many they get."""
