"""One decoding cycle as the device runs it by itself: draft, verify, accept, tidy up, move on.

Everything is read from and written to a `SteadyBatch`, and every shape follows from the batch's
size and the plan. So the two halves can be captured as graphs and replayed for as long as both
stay the same, and the host need not know how far the requests are.

Legend: B places of the batch, N nodes of a tree with its root, L levels of a walk.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fledge.contracts.settings import EngineSettings
from fledge.engine.accepted import compact_accepted
from fledge.engine.block_rows import without_drafts
from fledge.engine.cache import PagedCache
from fledge.engine.draft_plan import DraftPlan
from fledge.engine.drafter import Drafter, NoDrafter
from fledge.engine.head_drafter import Draft, HeadDrafter
from fledge.engine.steady_batch import Filters, SteadyBatch
from fledge.models.target import Target
from fledge.ops.accept import Walk
from fledge.ops.paged import BlockTables
from fledge.ops.root_pass import make_root_pass
from fledge.ops.tree import TreeBatch, root_only
from fledge.ops.tree_pass import make_steady_tree_pass


def runs_ahead(target: Target, drafter: Drafter, settings: EngineSettings, num_levels: int) -> bool:
    """Whether cycles of an engine run ahead of the host."""
    is_known = isinstance(drafter, HeadDrafter | NoDrafter) and settings.accept == "gumbel"
    # A head reads all that a cycle has said, and its window must not have let go of any of it.
    is_known = is_known and (drafter.window is None or drafter.window >= num_levels)
    return is_known and settings.wants_ahead(target.device.type)


class SteadyCycle:
    """The two halves of a cycle over one batch."""

    def __init__(
        self, target: Target, cache: PagedCache, drafter: Drafter, walk: Callable[..., Walk]
    ) -> None:
        self._target, self._cache, self._drafter = target, cache, drafter
        self._walk = walk

    @torch.no_grad()
    def draft(self, batch: SteadyBatch, plan: DraftPlan, *, has_noise: bool) -> Draft:
        """Trees of all places."""
        assert isinstance(self._drafter, HeadDrafter)
        tables = self._tables(batch)
        return self._drafter.draft_steadily(batch, tables, plan, has_noise=has_noise)

    def drafts_with_noise(self, filters: Filters) -> bool:
        """Whether drafts for requests that sample so are others than for greedy ones."""
        is_noisy = isinstance(self._drafter, HeadDrafter) and self._drafter.has_noise
        return is_noisy and filters.can_sample

    @torch.no_grad()
    def gains(self, draft: Draft, plan: DraftPlan) -> Tensor:
        """What drafting less would have yielded."""
        assert isinstance(self._drafter, HeadDrafter)
        return self._drafter.gains_of(draft, plan)

    @torch.no_grad()
    def read_along(self, batch: SteadyBatch) -> None:
        """Have the head read what was said last, so that it can draft in the next cycle."""
        assert isinstance(self._drafter, HeadDrafter)
        self._drafter.read_steadily(batch, self._tables(batch))

    @torch.no_grad()
    def verify(
        self,
        batch: SteadyBatch,
        trees: TreeBatch | None,
        filters: Filters,
        *,
        is_bare: bool = False,
    ) -> None:
        """Run the target over the trees; the batch then says what came of it.

        `is_bare` keeps nothing for the head.
        """
        tables, last_position = self._cache.all_tables, self._target.context_len - 1
        if trees is None:
            tables = without_drafts(tables, self._target.context_len)
            packed = make_root_pass(batch.ends, tables, last_position)
            rows_BN, verified = packed.starts_B[:, None], root_only(packed.token_ids_T)
        else:
            packed, rows_BN = make_steady_tree_pass(batch.ends, trees, tables, last_position)
            verified = trees
        taps = () if is_bare else self._drafter.taps
        output = self._target.forward(packed, self._cache.target_memory, taps=taps)
        if output.features_TF is not None:
            self._drafter.remember(output.features_TF, packed)
        walk = self._walk(
            output.logits_RV,
            rows_BN,
            verified,
            batch.sampling(filters),
            batch.said_B,
            max_depth=verified.max_depth,
        )
        if trees is not None:
            compact_accepted(self._cache, packed, walk.nodes_BL, walk.lengths_B)
            self._tally(batch, trees, walk)
        batch.settle(walk, verified)

    def _tables(self, batch: SteadyBatch) -> BlockTables:
        return self._cache.all_tables[batch.rows_B]

    def _tally(self, batch: SteadyBatch, trees: TreeBatch, walk: Walk) -> None:
        assert isinstance(self._drafter, HeadDrafter)
        drafted = Walk(
            tokens_BL=walk.tokens_BL,
            nodes_BL=walk.nodes_BL,
            lengths_B=walk.lengths_B,
            failed_B=walk.failed_B | ~batch.is_drafted_B,
            logprobs=None,
        )
        self._drafter.calibration.tally(trees, drafted, ~batch.is_greedy_B)
