"""Which plan cycles of a load should have: the best one, or the one in use if it is about as good.

Drafting that begins after plain decoding has to be better by more than what is kept, and captured
cycles have to earn what it takes to change hands: what is in flight is awaited, and the head reads
what it missed. It is earned in the cycles that are left, of which those who are there say how many
there may be.
"""

from dataclasses import dataclass

from fledge.engine.draft_plan import PLAIN, DraftPlan, Load
from fledge.engine.menu_planner import MenuPlanner
from fledge.engine.outlook import Outlook, Planner

_CLEARLY_BETTER, _CLEARLY_BETTER_CAPTURED = 1.005, 1.02
_WORTH_KEEPING, _WORTH_KEEPING_CAPTURED = 1.0, 1.01
"""Times plain decoding, below which drafting ends."""
_CATCH_UP_CYCLES = 256
"""Cycles over which drafting again has to earn what catching up costs, where as many are left."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan for loads of one size."""

    plan: DraftPlan
    nodes_per_request: float
    outlook: Outlook
    expected_gain: float
    """Over plain decoding."""
    version: int


class PlanComparison:
    """Compares the best plan with the one in use."""

    def __init__(self, planner: Planner, menu: MenuPlanner) -> None:
        self._planner, self._menu = planner, menu

    def choose(
        self,
        incumbent: Choice | None,
        load: Load,
        *,
        believed: float,
        reluctance: float,
        version: int,
    ) -> Choice:
        """`believed` is the share of a drafting rate to count on, `reluctance` what drafting has to
        gain beyond being better before it begins."""
        planner = self._planner if load.menu is None else self._menu
        outlook = planner.outlook(load)
        best, best_rate = outlook.best_drafting, believed * outlook.drafting_rate
        backlog_s = self._planner.backlog_s(load)
        if best is not None:
            best_rate *= self._share_after_catching_up(best, outlook.drafting_rate, load, backlog_s)
        kept, kept_rate = PLAIN, outlook.plain_rate
        # A captured batch whose head is behind decodes plainly, whatever one that had as much
        # cached came to do.
        is_plain = load.menu is not None and backlog_s > 0.0
        if incumbent is not None and not is_plain:
            kept = self._kept(incumbent, outlook, load)
            kept_rate = self._planner.rate(kept, load) * (1.0 if kept.is_plain else believed)
        worth = _WORTH_KEEPING if load.menu is None else _WORTH_KEEPING_CAPTURED
        if kept_rate <= worth * outlook.plain_rate:
            kept, kept_rate = PLAIN, outlook.plain_rate
        margin = _CLEARLY_BETTER if load.menu is None else _CLEARLY_BETTER_CAPTURED
        margin += reluctance if kept.is_plain else 0.0
        if best is None or best_rate < margin * kept_rate:
            best, best_rate = kept, kept_rate
        return Choice(
            plan=best,
            nodes_per_request=best.nodes / load.num_requests,
            outlook=outlook,
            expected_gain=best_rate / outlook.plain_rate,
            version=version,
        )

    def _share_after_catching_up(
        self, plan: DraftPlan, rate: float, load: Load, backlog_s: float
    ) -> float:
        """Of a rate, what is left of it when the head first has to catch up."""
        emitted = self._planner.emitted(plan, load)
        num_cycles = float(_CATCH_UP_CYCLES)
        if load.tokens_left is not None:
            num_cycles = min(num_cycles, max(1.0, load.tokens_left / emitted))
        cycle_s = emitted / rate
        return cycle_s / (cycle_s + backlog_s / num_cycles)

    def _kept(self, incumbent: Choice, outlook: Outlook, load: Load) -> DraftPlan:
        """The plan in use, for this load."""
        if load.menu is None:
            return self._planner.fit(incumbent.plan, incumbent.nodes_per_request, load)
        if incumbent.plan.is_plain or incumbent.plan in load.menu.drafting:
            return incumbent.plan
        return outlook.best_drafting or PLAIN  # of another size of batch: there is none in use
