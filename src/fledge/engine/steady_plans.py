"""What may be planned for cycles that run ahead, and how a plan is fitted to their batch."""

import math
from collections.abc import Callable
from dataclasses import replace

from fledge.engine.draft_gains import NODE_GRID
from fledge.engine.draft_plan import PLAIN, DraftPlan, Load, Menu
from fledge.engine.graphs import Graphs
from fledge.engine.steady_places import SteadyPlaces
from fledge.engine.steady_runs import SteadyRuns
from fledge.engine.steady_sizes import SteadySizes

_KINDS_PER_PLAN = 2
"""Drafting and verifying."""

Plans = Callable[[int], tuple[DraftPlan, ...]]
"""Drafting plans that may be wanted for a batch of so many."""


class SteadyPlans:
    """Plans of the batch that runs ahead."""

    def __init__(
        self,
        runs: SteadyRuns,
        sizes: SteadySizes,
        graphs: Graphs,
        places: SteadyPlaces,
        wanted: Plans | None,
        *,
        max_pass_tokens: int,
    ) -> None:
        """`wanted` is None where nothing is drafted by cycles that run ahead."""
        self._runs, self._sizes, self._graphs, self._places = runs, sizes, graphs, places
        self._wanted, self._max_pass_tokens = wanted, max_pass_tokens

    def menu(self, num_requests: int) -> tuple[int, Menu | None]:
        """Places that so many requests have or would have, and what may be planned for them."""
        if self._wanted is None or not self._graphs.is_capturing:
            return 0, None
        if (batch := self._places.batch) is not None and batch.size >= num_requests:
            size = batch.size
        else:
            size = self._sizes.pick(num_requests, is_drafting=True)
        plans, filters = self._wanted(size), self._places.filters
        ready = frozenset(plan for plan in plans if self._runs.is_ready(size, plan, filters))
        return size, Menu(plans, ready, capture_s=_KINDS_PER_PLAN * self._graphs.cost_s)

    def fit(self, plan: DraftPlan, load: Load) -> DraftPlan:
        """About the same plan for all places: few numbers of nodes, so that few are captured."""
        assert self._places.batch is not None
        size = self._places.batch.size
        room = self._max_pass_tokens - size
        if plan.is_plain or room < 1:
            return PLAIN
        if not any(seq.may_have_drafts for seq in self._places.sequences):
            return PLAIN
        if load.num_places == size and plan.num_drafted is None:
            return plan
        each = plan.nodes / load.num_rows
        if plan.nodes % load.num_rows:
            each = min(NODE_GRID, key=lambda step: abs(math.log(step / each)))
        return replace(plan, nodes=min(max(1, round(each * size)), room))
