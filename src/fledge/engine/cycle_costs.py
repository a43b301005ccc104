"""How long a cycle will take: head passes, the verify pass, everything else.

Pass times come from `PassTimes`. What they leave out (growing trees, sampling, scheduling) is
learned from whole cycles: a factor on all head passes, and the rest of a cycle with and without
drafts.
"""

import math

import numpy as np
from numpy.typing import NDArray

from fledge.engine.draft_plan import CycleReport, Load
from fledge.engine.pass_times import PassTimes

Array = NDArray[np.float64]

_RATE = 0.1
_LARGEST_SURPRISE = 0.5


class CycleCosts:
    """Expected seconds of a cycle under a load."""

    def __init__(self, times: PassTimes) -> None:
        self._times = times
        self._log_factor = 0.0
        self._num_drafted = 0
        self._headless_s = 0.0
        self._other_s: dict[bool, float] = {}
        """The rest of a cycle, by whether it drafts."""

    @property
    def draft_factor(self) -> float:
        """Drafting time against the head passes alone."""
        return math.exp(self._log_factor)

    def plain_s(self, load: Load) -> float:
        """A cycle without drafts."""
        num_tokens = load.num_requests + load.num_other_tokens
        return self._times.target_s(num_tokens, load.context_tokens) + self.other_s(False)

    def drafting_s(
        self, load: Load, depths: Array, widths: Array, nodes: Array, gains: Array
    ) -> Array:
        """Cycles with drafts: arrays of one shape in, one out."""
        num_tokens = load.num_requests + load.num_other_tokens + nodes
        verify = self._times.target.seconds(num_tokens) + (
            self._times.context_s * load.context_tokens
        )
        # In a steady state the head reads what the cycle before emitted.
        extended = load.num_requests * (1.0 + gains)
        draft = self._draft_s(load.num_requests, depths, widths, extended)
        total: Array = draft + verify + self.other_s(True)
        return total

    def other_s(self, has_drafts: bool) -> float:
        """Outside the passes; the other kind of cycle's while this kind was not seen."""
        known = self._other_s
        return known.get(has_drafts, known.get(not has_drafts, 0.0))

    def observe(self, report: CycleReport) -> None:
        """Learn from the times of a cycle."""
        load, plan = report.load, report.plan
        num_tokens = load.num_requests + load.num_other_tokens + plan.nodes
        self._times.refine(num_tokens, report.target_s, load.context_tokens)
        has_drafts = not plan.is_plain
        before = self._other_s.get(has_drafts)
        if before is None:
            self._other_s[has_drafts] = report.other_s
        else:
            # A pause of the host is not the price of a cycle.
            likely_s = min(report.other_s, 4.0 * before + 1e-4)
            self._other_s[has_drafts] = before + _RATE * (likely_s - before)
        if has_drafts and report.draft_s > 0:
            self._learn_factor(report)

    def _learn_factor(self, report: CycleReport) -> None:
        self._num_drafted += 1
        rate = max(_RATE, 1.0 / self._num_drafted)
        self._headless_s += rate * (report.draft_s - self._headless_s)
        extended = report.num_extended or report.load.num_requests
        one = np.ones(1)
        expected = self._draft_s(
            report.load.num_requests,
            report.plan.depth * one,
            report.plan.width * one,
            extended * one,
        )[0]
        surprise = math.log(report.draft_s / max(float(expected), 1e-9))
        clipped = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        self._log_factor += rate * clipped

    def _draft_s(self, num_requests: int, depths: Array, widths: Array, extended: Array) -> Array:
        head = self._times.head
        if head is None:
            return np.full_like(extended, self._headless_s)
        steps = (depths - 1.0) * head.seconds(num_requests * widths)
        result: Array = self.draft_factor * (head.seconds(extended) + steps)
        return result
