"""Tokens per second to be expected of every plan under a load, and the best of them.

Legend: D depths, P width presets, X numbers of nodes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fledge.contracts.settings import TreeSettings
from fledge.engine.acceptance_model import AcceptanceModel
from fledge.engine.cycle_costs import CycleCosts
from fledge.engine.draft_gains import NODE_GRID
from fledge.engine.draft_plan import PLAIN, DraftPlan, Load

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected under one load."""

    plain_rate: float
    """Tokens per second without drafts."""

    best_drafting: DraftPlan | None
    """The best plan that drafts; None where there is no room for a node."""

    drafting_rate: float
    """What it is expected to yield."""

    promising: DraftPlan | None
    """What would be best if sizes of passes that were hardly seen were as fast as they may be."""

    hope: float = 1.0
    """Whether it is worth looking for a plan that pays: 0 where even a very good head would gain
    little, 1 where it would gain much, or nobody knows."""


class Planner:
    """Compares plans by what is known of acceptance and cost."""

    def __init__(
        self, tree: TreeSettings, model: AcceptanceModel, costs: CycleCosts, max_pass_tokens: int
    ) -> None:
        self._tree = tree
        self._model = model
        self._costs = costs
        self._max_pass_tokens = max_pass_tokens
        self._grid = np.array(NODE_GRID)
        self._depths_D11 = np.arange(1, tree.depth + 1, dtype=float)[:, None, None]
        self._widths_1P1 = np.array(model.widths, dtype=float)[None, :, None]
        self._candidates_DP1 = self._widths_1P1 + (self._depths_D11 - 1) * self._widths_1P1**2

    def max_nodes(self, load: Load) -> int:
        """Drafted nodes that fit the pass and the budgets of the requests."""
        room = self._max_pass_tokens - load.num_requests - load.num_other_tokens
        return max(0, min(self._tree.budget * load.num_requests, room))

    def outlook(self, load: Load) -> Outlook:
        """The best of all depths, widths and numbers of nodes."""
        plain_rate = self.plain_rate(load)
        if (max_nodes := self.max_nodes(load)) == 0:
            return Outlook(plain_rate, None, 0.0, None)
        nodes_X = np.unique(np.rint(self._grid * load.num_requests).clip(1, max_nodes))
        gains_DPX = self._model.gains(nodes_X / load.num_requests)
        expected_DPX, fastest_DPX = self._costs.every_drafting_s(
            load, self._depths_D11, self._widths_1P1, nodes_X, gains_DPX
        )
        # More nodes than candidates would be padding; one node always exists.
        exists_DPX = nodes_X <= self._candidates_DP1 * load.num_requests
        emitted_DPX = np.where(exists_DPX, load.num_requests * (1.0 + gains_DPX), 0.0)

        def best(rates_DPX: Array) -> DraftPlan:
            depth, preset, place = np.unravel_index(int(rates_DPX.argmax()), rates_DPX.shape)
            return DraftPlan(int(depth) + 1, self._model.widths[preset], int(nodes_X[place]))

        rates_DPX = emitted_DPX / expected_DPX
        return Outlook(
            plain_rate, best(rates_DPX), float(rates_DPX.max()), best(emitted_DPX / fastest_DPX)
        )

    def wanted(self, plan: DraftPlan, load: Load) -> float:
        """Accepted drafts of each request in a cycle with which drafting would just pay."""
        drafting_s = self._costs.drafting_s(load, plan, load.num_requests)
        return max(0.0, drafting_s / max(self._costs.plain_s(load), 1e-9) - 1.0)

    def plain_rate(self, load: Load) -> float:
        """Expected tokens per second without drafts."""
        return self.rate(PLAIN, load)

    def emitted(self, plan: DraftPlan, load: Load) -> float:
        """Expected tokens of one cycle."""
        if plan.is_plain:
            return float(load.num_requests)
        num_drafted = load.num_requests if plan.num_drafted is None else plan.num_drafted
        gain = self._model.gain(plan.depth, plan.width, plan.nodes / num_drafted)
        return load.num_requests + num_drafted * gain

    def rate(self, plan: DraftPlan, load: Load) -> float:
        """Expected tokens per second of a plan that is used in every cycle."""
        if plan.is_plain:
            return load.num_requests / max(self._costs.plain_s(load), 1e-9)
        emitted = self.emitted(plan, load)
        # The head reads nothing of requests that it does not draft for.
        num_others = 0 if plan.num_drafted is None else load.num_requests - plan.num_drafted
        return emitted / max(self._costs.drafting_s(load, plan, emitted - num_others), 1e-9)

    def cycle_s(self, plan: DraftPlan, load: Load) -> float:
        """Expected seconds of one cycle of a plan now, catching up included."""
        if plan.is_plain:
            return self._costs.plain_s(load)
        num_drafted = load.num_requests if plan.num_drafted is None else plan.num_drafted
        unread = sorted(load.unread)[:num_drafted] if plan.num_drafted else load.unread
        return self._costs.drafting_s(load, plan, max(num_drafted, sum(unread)))

    def loss_s(self, plan: DraftPlan, load: Load, usual_rate: float) -> float:
        """What one cycle of a plan would lose now, in seconds."""
        return self.cycle_s(plan, load) - self.emitted(plan, load) / usual_rate

    def backlog_s(self, load: Load) -> float:
        """What drafting for everybody costs once, beyond what every cycle leaves unread."""
        usual = load.num_requests * (self._tree.depth + 1)
        return self._costs.catch_up_s(sum(load.unread) - usual)

    def fit(self, plan: DraftPlan, nodes_per_request: float, load: Load) -> DraftPlan:
        """The same plan for another number of requests."""
        max_nodes = self.max_nodes(load)
        if plan.is_plain or max_nodes == 0:
            return PLAIN
        nodes = min(max(1, round(nodes_per_request * load.num_requests)), max_nodes)
        return DraftPlan(plan.depth, plan.width, nodes)
