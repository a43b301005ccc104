"""Plans for cycles that are captured: a few for each size of batch, and when another one pays.

A plan that is not captured costs a capture before it earns anything. What is lost by doing without
it is added up, and once that is as much as the capture would have cost, the plan is taken up.
"""

from fledge.contracts.settings import TreeSettings
from fledge.engine.acceptance_model import AcceptanceModel
from fledge.engine.cycle_costs import CycleCosts
from fledge.engine.draft_plan import DraftPlan, Load, Menu
from fledge.engine.outlook import Outlook, Planner

_BEST_CHILDREN = (0.45, 0.6, 0.75, 0.87)
"""Chances of a node's best child, from poor heads to very good ones."""

_LITTLE_GAIN, _MUCH_GAIN = 0.05, 0.5
"""Over plain decoding, what is not worth a probe, and what is worth all that probes may cost."""

_CONTEXT = 512
"""Tokens that a request is taken to have cached."""


class MenuPlanner:
    """Compares the plans on a menu, and says what should be on it."""

    def __init__(
        self, tree: TreeSettings, costs: CycleCosts, planner: Planner, max_pass_tokens: int
    ) -> None:
        self._planner = planner
        self._by_accuracy = [
            Planner(tree, AcceptanceModel(tree, chance), costs, max_pass_tokens)
            for chance in _BEST_CHILDREN
        ]
        self._plans: dict[int, tuple[DraftPlan, ...]] = {}
        self._lost_s: dict[tuple[int, DraftPlan], float] = {}

    def plans(self, num_places: int) -> tuple[DraftPlan, ...]:
        """What would be best for heads of all qualities, from the pass times."""
        if num_places not in self._plans:
            load = Load(num_requests=num_places, context_tokens=_CONTEXT * num_places)
            best = {planner.outlook(load).best_drafting for planner in self._by_accuracy}
            found = [plan for plan in best if plan is not None]
            self._plans[num_places] = tuple(
                sorted(found, key=lambda plan: (plan.depth, plan.width, plan.nodes))
            )
        return self._plans[num_places]

    def outlook(self, load: Load) -> Outlook:
        """Of plans that are ready or have become worth a capture; of all where none is ready."""
        menu, plain_rate = load.menu, self._planner.plain_rate(load)
        if menu is None or not menu.drafting:
            return Outlook(plain_rate, None, 0.0, None)
        rates = {plan: self._planner.rate(plan, load) for plan in menu.drafting}
        due = [
            plan
            for plan in rates
            if plan in menu.ready or self._lost_s.get((load.num_places, plan), 0.0) > menu.capture_s
        ]
        best = max(due or rates, key=rates.__getitem__)
        promising = max(rates, key=rates.__getitem__)
        return Outlook(plain_rate, best, rates[best], promising, self._hope(menu, load))

    def _hope(self, menu: Menu, load: Load) -> float:
        very_good = self._by_accuracy[-1]
        most = max(very_good.rate(plan, load) for plan in menu.drafting)
        gain = most / very_good.plain_rate(load) - 1.0
        return min(1.0, max(0.0, (gain - _LITTLE_GAIN) / (_MUCH_GAIN - _LITTLE_GAIN)))

    def count_cycle(self, outlook: Outlook, load: Load) -> None:
        """A cycle goes without a plan that is not ready."""
        best, wanted = outlook.best_drafting, outlook.promising
        if best is None or wanted is None or best == wanted:
            return
        wanted_rate = self._planner.rate(wanted, load)
        rate = max(outlook.plain_rate, self._planner.rate(best, load))
        cycle_s = self._planner.cycle_s(best, load)
        key = load.num_places, wanted
        lost_s = cycle_s * max(0.0, 1.0 - rate / wanted_rate)
        self._lost_s[key] = self._lost_s.get(key, 0.0) + lost_s
