"""How far to draft chains on a CPU, down to nothing, for the most tokens per second.

A head says how probable each of its drafts is, so a chain ends by itself where going on costs more
than it is likely to bring: what a further row of the pass takes is compared with what a token takes
on the whole. All times are those of real cycles, as if the machine were always equally fast.
Whether drafting pays at all is decided by what cycles with and without drafts yielded; while it
does not, a small share of the time is spent on looking again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fledge.contracts.settings import TreeSettings
from fledge.engine.chain_estimates import ChainOutcome, Line, Rate, Speed, Trust
from fledge.engine.draft_plan import CycleReport
from fledge.engine.pass_times import PassTimes

_FIRST_PLAIN = 2
"""Cycles without drafts at the start: they tell what to compare with."""

_DOUBT = 3.0
"""Share of plain decoding's speed that drafts may be slower by, over the cycles with drafts since
they were begun with: few say little, and giving up what pays costs more than a few that do not."""

_CLEARLY_BETTER = 1.02
_PLAIN_EVERY = 128
"""Cycles with drafts between two without: what plain decoding takes may change."""

_FIRST_CYCLES = 8
"""Cycles with drafts for requests that are all new, whatever those before them yielded; fewer after
several that were given up."""

_MANY_GIVEN_UP = 4
"""One after the other: from here on what was saved without drafts pays for trying them."""

_SURE_CYCLES = 16
"""Cycles with drafts that pay before those given up are forgotten."""

_FEW_ROWS = 4
"""Of a pass with a usual chain."""

_PROBING_SHARE = 0.008
_MOST_SAVED_S = 0.1
_NEXT_IS_RIGHT = 0.75
"""How probable a further draft is thought to be before it is made."""


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """Drafts of the next cycle: up to a depth, and while a chain is probable enough."""

    depth: int
    least_drafted: float = 0.0
    """Chains less probable are not gone on with."""

    least_verified: float = 0.0
    """Drafts at the end of a chain less probable are left out of the pass."""

    least_copied: float = 0.0
    """The same for chains that are copied."""


NO_CHAINS = ChainPlan(0)


class FixedChains:
    """The chains that the settings ask for, in every cycle."""

    def __init__(self, depth: int) -> None:
        self._plan = ChainPlan(depth)

    def choose(self) -> ChainPlan:
        return self._plan

    def state(self) -> dict[str, object]:
        return {}


class AdaptiveChains:
    """Chains as long as they pay."""

    def __init__(
        self, depth: int, times: PassTimes | None = None, *, is_sampled: bool = False
    ) -> None:
        """`times` are believed until cycles have shown what rows and steps take; `is_sampled` says
        that they are for requests above temperature 0."""
        self._depth, self._times = depth, times
        self._name = "sampled_chains" if is_sampled else "chains"
        self._rows, self._steps = Line(), Line()
        self._speed = Speed()
        self._plain = Rate()
        self._drafting = Rate()
        self._is_drafting = True
        self._num_since_begun = 0
        self._saved_s = 0.0
        self._since_plain = 0
        self._num_given_up = 0
        self._trust, self._trust_in_copies = Trust(is_modest=not is_sampled), Trust()
        self._num_drafting = self._num_plain = 0

    def begin(self) -> None:
        """All requests are new: what those before them said may have been easier or harder.

        After many whose drafts were given up, what was saved without drafts has to pay for it.
        """
        if self._is_drafting and self._gain < 1.0:
            self._num_given_up += 1
            self._is_drafting = False
        if self._num_given_up <= _MANY_GIVEN_UP or self._saved_s > self._likely_loss_s:
            self._is_drafting, self._num_since_begun = True, 0

    def choose(self) -> ChainPlan:
        if self._num_plain < _FIRST_PLAIN:
            return NO_CHAINS
        if self._is_drafting:
            self._since_plain += 1
            if self._since_plain > _PLAIN_EVERY:
                self._since_plain = 0
                return NO_CHAINS
            return self._plan()
        return self._plan() if self._saved_s > self._likely_loss_s else NO_CHAINS

    @property
    def _likely_loss_s(self) -> float:
        """Of one cycle with drafts."""
        return self._drafting.cycle_s - self._drafting.per_cycle * self._plain.token_s

    def _plan(self) -> ChainPlan:
        token_s = 0.6 * self._plain.token_s
        if self._drafting.is_known:
            # Where drafts lose, a token is worth what it takes without them.
            token_s = min(self._drafting.token_s, self._plain.token_s)
        row_s, step_s = self._further_s()
        if row_s is None or not token_s:
            return ChainPlan(self._depth)
        verified = self._trust.least_for(row_s / token_s)
        copied = self._trust_in_copies.least_for(row_s / token_s)
        drafted = self._trust.least_for((row_s + step_s) / (token_s * _NEXT_IS_RIGHT))
        return ChainPlan(self._depth, drafted, verified, copied)

    def _further_s(self) -> tuple[float | None, float]:
        """What one more row takes, None where nobody knows yet, and one more step."""
        row_s, step_s, times = self._rows.further_s, self._steps.further_s, self._times
        if times is not None:
            if row_s is None:
                row_s = (times.target_s(_FEW_ROWS) - times.target_s(1)) / (_FEW_ROWS - 1)
            if step_s is None:
                step_s = times.head_s(1)
        return row_s, step_s or 0.0

    def observe(
        self, report: CycleReport, num_levels: int, outcomes: Sequence[ChainOutcome]
    ) -> None:
        """A cycle has ended, for which the head took so many steps."""
        num_rows = report.load.num_requests + report.plan.nodes
        expected_s = self._rows.at(num_rows) + (self._steps.at(num_levels) if num_levels else 0.0)
        scale = self._speed.scale(report.target_s + report.draft_s, expected_s)
        cycle_s = report.cycle_s * scale
        self._rows.add(num_rows, report.target_s * scale)
        if report.plan.is_plain:
            self._num_plain += 1
            if self._num_plain > 1:  # the first one touches new memory
                self._plain.add(report.emitted, cycle_s)
            most_s = max(_MOST_SAVED_S, 2.0 * self._likely_loss_s)
            self._saved_s = min(self._saved_s + _PROBING_SHARE * cycle_s, most_s)
            return
        self._num_drafting += 1
        self._steps.add(num_levels, report.draft_s * scale)
        self._trust.add([one for one in outcomes if not one.is_copied])
        self._trust_in_copies.add([one for one in outcomes if one.is_copied])
        if self._num_drafting > 1:
            self._drafting.add(report.emitted, cycle_s)
        if not self._is_drafting or self._num_given_up > _MANY_GIVEN_UP:
            self._saved_s -= max(0.0, cycle_s - report.emitted * self._plain.token_s)
        self._decide()

    @property
    def _gain(self) -> float:
        """Of drafts over plain decoding; 1 where nothing is known."""
        if not (self._drafting.is_known and self._plain.is_known):
            return 1.0
        return self._plain.token_s / self._drafting.token_s

    def _decide(self) -> None:
        gain = self._gain
        if not self._is_drafting:
            if gain > _CLEARLY_BETTER:
                self._is_drafting, self._num_since_begun = True, 0
            return
        self._num_since_begun += 1
        is_first = self._num_since_begun < _FIRST_CYCLES / max(1, self._num_given_up)
        doubt = _DOUBT / (1 + self._num_given_up)
        if not is_first and gain < 1.0 - doubt / self._num_since_begun:
            self._is_drafting = False
            self._num_given_up += 1
        elif gain > _CLEARLY_BETTER and self._num_since_begun >= _SURE_CYCLES:
            self._num_given_up = 0

    def state(self) -> dict[str, object]:
        plan = self._plan() if self._is_drafting else NO_CHAINS
        is_known = self._drafting.is_known and self._plain.is_known
        return {
            self._name: {
                "depth": plan.depth,
                "least_drafted": plan.least_drafted,
                "least_verified": plan.least_verified,
                "step_s": self._steps.further_s,
                "row_s": self._rows.further_s,
                "least_copied": plan.least_copied,
                "acceptance_at_probability": self._trust.shares(),
                "acceptance_of_copies": self._trust_in_copies.shares(),
                "measured_gain": self._gain if is_known else None,
                "plain_cycles": self._num_plain,
                "drafting_cycles": self._num_drafting,
            }
        }


class ChainPlanners(NamedTuple):
    """Who plans chains. What drafts are worth above temperature 0 says nothing of greedy ones."""

    greedy: FixedChains | AdaptiveChains
    sampled: FixedChains | AdaptiveChains
    """For cycles with any request above temperature 0."""

    def state(self) -> dict[str, object]:
        return self.greedy.state() | self.sampled.state()


def make_chains(tree: TreeSettings, times: PassTimes | None) -> ChainPlanners | None:
    """Who plans chains, by these times or, without any, as the settings say.

    None where trees that have branches are asked for in every cycle.
    """
    depth = min(tree.depth, tree.budget)
    if times is not None:
        greedy, sampled = (AdaptiveChains(depth, times, is_sampled=one) for one in (False, True))
        return ChainPlanners(greedy, sampled)
    return ChainPlanners(FixedChains(depth), FixedChains(depth)) if tree.width == 1 else None


def path_probabilities(probabilities: list[float]) -> list[float]:
    """How probable a chain is up to each of its drafts."""
    found, path = [], 1.0
    for one in probabilities:
        path *= one if math.isfinite(one) else 0.0
        found.append(path)
    return found
