"""How long a cycle will take: head passes, the verify pass, everything else.

Pass times come from `PassTimes` and are corrected by every cycle. What happens between the head
passes of a cycle, such as growing trees, counts as theirs; what happens outside all passes is
learned for cycles with and without drafts.
"""

import math

import numpy as np
from numpy.typing import NDArray

from fledge.engine.draft_plan import CycleReport, DraftPlan, Load
from fledge.engine.pass_times import PassTimes

Array = NDArray[np.float64]

_RATE = 0.1
_LIKELY_CYCLES = 2.0
"""What catching up takes at most before it was seen twice, in cycles with drafts."""


class CycleCosts:
    """Expected seconds of a cycle under a load."""

    def __init__(self, times: PassTimes) -> None:
        self._times = times
        self._num_drafted = 0
        self._headless_s = 0.0
        self._catching_up_s: float | None = None
        """What a captured cycle takes longer before which the head caught up."""

        self._other_s: dict[bool, float] = {}
        """The rest of a cycle, by whether it drafts."""

    @property
    def cached_token_s(self) -> float:
        """What each cached token adds to a cycle."""
        return self._times.context_s

    def plain_s(self, load: Load) -> float:
        """A cycle without drafts."""
        num_tokens = load.num_rows + load.num_other_tokens
        return self._times.target_s(num_tokens, load.context_tokens) + self.other_s(False)

    def num_plain_seen(self, load: Load) -> float:
        """How many passes of about the size of a plain one have been seen."""
        return self._times.target.num_seen(load.num_rows + load.num_other_tokens)

    def drafting_s(self, load: Load, plan: DraftPlan, num_extended: float) -> float:
        """A cycle with drafts whose head first reads so many tokens."""
        num_tokens = load.num_rows + load.num_other_tokens + plan.nodes
        rest_s = self._times.target_s(num_tokens, load.context_tokens) + self.other_s(True)
        num_drafted = load.num_rows if plan.num_drafted is None else plan.num_drafted
        catching_up_s = self._catching_up_s if load.menu is not None else None
        if catching_up_s is not None and num_extended > num_drafted * plan.most_unread:
            num_extended, rest_s = num_drafted, rest_s + catching_up_s
        return rest_s + self.draft_s(num_drafted, plan, num_extended)

    def draft_s(self, num_drafted: int, plan: DraftPlan, num_extended: float) -> float:
        """The head passes of a cycle."""
        if (head := self._times.head) is None:
            return self._headless_s
        steps_s = (plan.depth - 1) * head.at(num_drafted * plan.width)
        return head.at(num_extended) + steps_s

    def catch_up_s(self, num_unread: int) -> float:
        """What the head needs for tokens that plain decoding left unread."""
        if (head := self._times.head) is None or num_unread <= 0:
            return 0.0
        return max(head.at(num_unread) - head.at(0), self._catching_up_s or 0.0)

    def every_drafting_s(
        self, load: Load, depths: Array, widths: Array, nodes: Array, gains: Array
    ) -> tuple[Array, Array]:
        """Cycles with drafts for all requests: what is expected, and what is possible at best.

        Takes arrays that broadcast to one shape.
        """
        num_tokens = load.num_requests + load.num_other_tokens + nodes
        if (head := self._times.head) is None:
            draft_s = np.full_like(gains, self._headless_s)
        else:
            # In a steady state the head reads what the cycle before emitted.
            steps_s = (depths - 1.0) * head.seconds(load.num_requests * widths)
            extend_s = head.seconds(load.num_requests * (1.0 + gains))
            draft_s = extend_s + steps_s
        rest_s = draft_s + self._times.context_s * load.context_tokens + self.other_s(True)
        target = self._times.target
        return rest_s + target.seconds(num_tokens), rest_s + target.fastest(num_tokens)

    def other_s(self, has_drafts: bool) -> float:
        """Outside the passes; the other kind of cycle's while this kind was not seen."""
        known = self._other_s
        if not has_drafts and len(known) == 2:
            # Without drafts there is less to do: plain cycles that were seen rarely, and slow, say
            # nothing against that.
            return min(known.values())
        return known.get(has_drafts, known.get(not has_drafts, 0.0))

    def observe(self, report: CycleReport) -> None:
        """Learn from the times of a cycle."""
        load, plan = report.load, report.plan
        num_tokens = load.num_rows + load.num_other_tokens + plan.nodes
        self._times.refine(num_tokens, report.target_s, load.context_tokens)
        if load.menu is not None and report.is_catching_up:
            # No captured cycle does that: the device waits for the host, which is paid once. Those
            # who decode plainly see no other cycles with drafts, and would find all of them dear.
            self._learn_catching_up(report)
            return
        has_drafts = not plan.is_plain
        before = self._other_s.get(has_drafts)
        if before is None:
            self._other_s[has_drafts] = report.other_s
        else:
            # A pause of the host is not the price of a cycle.
            likely_s = min(report.other_s, 4.0 * before + 1e-4)
            self._other_s[has_drafts] = before + _RATE * (likely_s - before)
        if has_drafts and report.draft_s > 0:
            self._learn_drafting(report)

    def _learn_catching_up(self, report: CycleReport) -> None:
        usual_s = self.draft_s(report.num_drafted, report.plan, report.num_drafted)
        found_s = max(0.0, report.draft_s + report.other_s - usual_s - self.other_s(True))
        before = self._catching_up_s
        if before is None:
            # The first one may have compiled kernels: if all of that were believed, no probe could
            # be paid for that shows how little the next one takes.
            most_s = _LIKELY_CYCLES * (report.target_s + usual_s)
            self._catching_up_s = min(found_s, most_s)
        elif found_s < before:
            self._catching_up_s = (before + found_s) / 2
        else:
            self._catching_up_s = before + _RATE * (min(found_s, 4.0 * before + 1e-4) - before)

    def _learn_drafting(self, report: CycleReport) -> None:
        self._num_drafted += 1
        rate = max(_RATE, 1.0 / self._num_drafted)
        self._headless_s += rate * (report.draft_s - self._headless_s)
        if (head := self._times.head) is None:
            return
        num_extended = max(report.num_extended, report.num_drafted)
        step_tokens = max(report.num_drafted, report.load.num_places) * report.plan.width
        extend_s = head.at(num_extended)
        steps_s = (report.plan.depth - 1) * head.at(step_tokens)
        # Only the sum is known; each size answers for its part of it.
        surprise = math.log(report.draft_s / max(extend_s + steps_s, 1e-9))
        head.nudge(num_extended, surprise, extend_s / (extend_s + steps_s))
        if steps_s > 0:
            head.nudge(step_tokens, surprise, steps_s / (extend_s + steps_s))
