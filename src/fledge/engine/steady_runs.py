"""The two halves of a cycle as graphs: which kinds there are, and what belongs together."""

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from fledge.engine.draft_plan import DraftPlan
from fledge.engine.graphs import Graphs
from fledge.engine.head_drafter import Draft
from fledge.engine.steady_batch import Filters, SteadyBatch
from fledge.engine.steady_cycle import SteadyCycle


class Trees(NamedTuple):
    """Trees of a cycle, and the graph that leaves them in the same place every time."""

    draft: Draft
    plan: DraftPlan
    graph: int | None


class SteadyRuns:
    """Runs cycles, captured where the device allows it."""

    def __init__(self, cycle: SteadyCycle, graphs: Graphs) -> None:
        self._cycle, self._graphs = cycle, graphs
        self._sizes: dict[bool, set[int]] = {True: set(), False: set()}

    def sizes(self, *, is_drafting: bool) -> set[int]:
        """Sizes of batches that some cycles were captured for."""
        return self._sizes[is_drafting]

    def is_ready(self, size: int, plan: DraftPlan, filters: Filters) -> bool:
        """Whether a cycle of this plan is replayed."""
        number = None
        if not plan.is_plain:
            has_noise = self._cycle.drafts_with_noise(filters)
            number = self._graphs.number_of(_draft_kind(size, plan, has_noise))
            if number is None:
                return False
        return self._graphs.number_of(_verify_kind(size, number, filters)) is not None

    def is_bare_ready(self, size: int, filters: Filters) -> bool:
        """Whether a cycle that keeps nothing for the head is replayed."""
        return self._graphs.number_of(_bare_kind(size, filters)) is not None

    def draft(self, batch: SteadyBatch, plan: DraftPlan, filters: Filters) -> Trees:
        has_noise = self._cycle.drafts_with_noise(filters)
        draft, number = self._graphs.run(
            _draft_kind(batch.size, plan, has_noise),
            lambda: self._cycle.draft(batch, plan, has_noise=has_noise),
        )
        return Trees(draft, plan, number)

    def gains(self, trees: Trees) -> Tensor:
        """What drafting less would have yielded."""

        def work() -> Tensor:
            return self._cycle.gains(trees.draft, trees.plan)

        name = ("gained", trees.draft.trees.tokens_BN.shape[0], trees.plan.depth, trees.plan.width)
        if trees.graph is None:  # candidates lie where none will lie again
            return self._graphs.launch(name, work)
        return self._graphs.run(("gains", trees.graph), work, seen_as=name)[0]

    def read_along(self, batch: SteadyBatch) -> None:
        """Have the head read what was said last, for a cycle without drafts among some with."""
        self._graphs.run(("along", batch.size), lambda: self._cycle.read_along(batch))

    def verify_bare(self, batch: SteadyBatch, filters: Filters) -> None:
        """A cycle without drafts that keeps nothing for the head."""

        def verify() -> None:
            self._cycle.verify(batch, None, filters, is_bare=True)

        _, number = self._graphs.run(_bare_kind(batch.size, filters), verify)
        if number is not None:
            self._sizes[False].add(batch.size)

    def verify(self, batch: SteadyBatch, trees: Trees | None, filters: Filters) -> None:
        def verify() -> None:
            self._cycle.verify(batch, None if trees is None else trees.draft.trees, filters)

        shape = None if trees is None else _shape(trees.plan)
        name = ("verified", batch.size, shape, filters)
        if trees is not None and trees.graph is None:
            self._graphs.launch(name, verify)  # of trees that lie where none will lie again
            return
        graph = None if trees is None else trees.graph
        kind = _verify_kind(batch.size, graph, filters)
        _, number = self._graphs.run(kind, verify, seen_as=name)
        if number is not None:
            self._sizes[trees is not None].add(batch.size)


def _shape(plan: DraftPlan) -> tuple[int, int, int]:
    return plan.depth, plan.width, plan.nodes


def _draft_kind(size: int, plan: DraftPlan, has_noise: bool) -> Hashable:
    return ("draft", size, *_shape(plan), has_noise)


def _bare_kind(size: int, filters: Filters) -> Hashable:
    return ("bare", size, filters)


def _verify_kind(size: int, graph: int | None, filters: Filters) -> Hashable:
    return ("verify", size, graph, filters)
