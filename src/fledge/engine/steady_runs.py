"""The two halves of a cycle as graphs: which kinds there are, and what belongs together."""

from typing import NamedTuple

from torch import Tensor

from fledge.engine.draft_plan import DraftPlan
from fledge.engine.graphs import Graphs
from fledge.engine.steady_batch import Filters, SteadyBatch
from fledge.engine.steady_cycle import SteadyCycle
from fledge.ops.tree import TreeBatch


class Trees(NamedTuple):
    """Trees of a cycle, and the graph that leaves them in the same place every time."""

    batch: TreeBatch
    graph: int | None


class SteadyRuns:
    """Runs cycles, captured where the device allows it."""

    def __init__(self, cycle: SteadyCycle, graphs: Graphs) -> None:
        self._cycle, self._graphs = cycle, graphs

    def draft(self, batch: SteadyBatch, plan: DraftPlan) -> tuple[Trees | None, Tensor | None]:
        """Trees, and the gains of their candidates if the plan asks for them."""
        if plan.is_plain:
            return None, None
        kind = ("draft", batch.size, plan.depth, plan.width, plan.nodes, plan.is_measured)
        (trees, gains), number = self._graphs.run(kind, lambda: self._cycle.draft(batch, plan))
        return Trees(trees, number), gains

    def verify(self, batch: SteadyBatch, trees: Trees | None, filters: Filters) -> None:
        def verify() -> None:
            self._cycle.verify(batch, None if trees is None else trees.batch, filters)

        if trees is not None and trees.graph is None:
            verify()  # of trees that lie where none will lie again
            return
        graph = None if trees is None else trees.graph
        self._graphs.run(("verify", batch.size, graph, filters), verify)
