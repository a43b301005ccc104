"""Passes over paged memory: flat tensors that say which token goes where and who sees whom.

A request's tokens are numbered; block tables map the numbers to slots, one table for each kind of
attention (full, or a window of some length), since window layers let go of old blocks. Everything
here is computed on the device from lengths that live there; the host knows only how many rows and
requests a pass has. `segments` is the exception: it is for the reference attention, which loops
over requests on the host.

Rows of one request in a `TreePass`, with 4 cached tokens, a chain c0 c1 and drafts a b below c1:

    rows      c0 c1 a b        numbers  4 5 6 7       positions  4 5 6 6
    sees      c0: cache, c0    c1: cache, c0, c1      a: cache, c0, c1, a     b: cache, c0, c1, b

Legend: B requests, T rows of the pass, N nodes of a tree with its root, P blocks of a table,
W frontier nodes of a request, S scratch entries, Q queries, K keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fledge.ops.packed import PassView, Segment, tree_mask
from fledge.ops.padding import pad_frontier, pad_tree_pass
from fledge.ops.paged_rows import FrontierRows, PagedRows, TreeRows
from fledge.ops.tree import TreeBatch, ancestors


@dataclass(frozen=True, slots=True)
class BlockTables:
    """Where the tokens of some requests are: one table for each window (None: full attention)."""

    block_size: int
    by_window: Mapping[int | None, Tensor]
    """Block numbers [B, P] by token number // block size; -1 where a window has let go."""

    def slots(self, window: int | None, request: Tensor | int, numbers: Tensor) -> Tensor:
        """Slots of token numbers; `request` is one row of the table, or one for each number."""
        blocks = self.by_window[window][request, numbers // self.block_size]
        # On a GPU the question would make the host wait.
        assert blocks.is_cuda or not (blocks < 0).any(), "a token number has no block"
        return blocks * self.block_size + numbers % self.block_size

    def __getitem__(self, rows: Tensor) -> "BlockTables":
        tables = {window: table[rows] for window, table in self.by_window.items()}
        return BlockTables(self.block_size, tables)


@dataclass(frozen=True, slots=True)
class TreePass:
    """Each request brings a causal chain of new tokens, and a draft tree below the last of them."""

    token_ids_T: Tensor
    positions_T: Tensor
    request_T: Tensor
    numbers_T: Tensor
    """Token number of each row: where it is stored."""

    starts_B: Tensor
    """First row of each request."""

    num_rows_B: Tensor
    context_B: Tensor
    """Cached tokens of each request, whose positions are their numbers."""

    chain_B: Tensor
    seen_BNN: Tensor | None
    """Ancestors of each tree node; None when nobody has drafts."""

    tables: BlockTables
    num_short: int
    """How many requests, from the first on, have few rows; the others read long chunks."""

    first_B: Tensor
    """Numbers below are never looked at: a head has no entry for token 0, a window lets go."""

    write_slots_T: Tensor | None = None
    """Slots of the rows where they are known already, and the same for all layers."""

    views: dict[int | None, PassView] = field(default_factory=dict, compare=False)

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]

    def node_rows(self, max_size: int) -> Tensor:
        """Row of each tree node, [B, N]; meaningless behind a tree's real nodes."""
        roots_B1 = (self.starts_B + self.chain_B - 1)[:, None]
        nodes_N = torch.arange(max_size, device=roots_B1.device)
        return (roots_B1 + nodes_N).clamp(max=self.num_tokens - 1)

    def view(self, window: int | None) -> PassView:
        if window not in self.views:
            slots_T = self.write_slots_T
            if slots_T is None:
                slots_T = self.tables.slots(window, self.request_T, self.numbers_T)
            self.views[window] = PassView(
                slots_T,
                lambda: pad_tree_pass(self, window),
                lambda first: self._segments(window, first),
            )
        return self.views[window]

    def paged(self, window: int | None) -> PagedRows:
        return PagedRows(
            rows=TreeRows(self.starts_B, self.num_rows_B, self.chain_B, self.first_B),
            context_B=self.context_B,
            positions_T=self.positions_T,
            seen_BRS=self.seen_BNN,
            table_BP=self.tables.by_window[window],
            block_size=self.tables.block_size,
            is_short=self.num_short == self.context_B.shape[0],
        )

    def _segments(self, window: int | None, first_request: int) -> tuple[Segment, ...]:
        lengths = [self.starts_B, self.num_rows_B, self.context_B, self.chain_B, self.first_B]
        segments = []
        for request, (start, num_rows, context, chain, first) in enumerate(
            torch.stack(lengths).t().tolist()
        ):
            if request < first_request or not num_rows:
                continue
            if window is not None:
                first = max(first, context - window + 1)
            numbers_K = torch.arange(first, context + num_rows, device=self.request_T.device)
            positions_Q = self.positions_T[start : start + num_rows]
            num_context = max(0, context - first)
            seen = self.seen_BNN
            visible_QK = None
            if num_rows > chain and seen is not None:
                num_nodes = num_rows - chain + 1
                visible_QK = tree_mask(num_context, chain, seen[request, :num_nodes, :num_nodes])
            segments.append(
                Segment(
                    start=start,
                    key_slots_K=self.tables.slots(window, request, numbers_K),
                    key_positions_K=torch.cat([numbers_K[:num_context], positions_Q]),
                    query_positions_Q=positions_Q,
                    visible_QK=visible_QK,
                )
            )
        return tuple(segments)


def make_tree_pass(
    *,
    chain_tokens_C: Tensor,
    chain_B: Tensor,
    context_B: Tensor,
    trees: TreeBatch | None,
    num_rows: int,
    tables: BlockTables,
    num_short: int,
    last_position: int | None = None,
    first_B: Tensor | None = None,
) -> TreePass:
    """Lay chains and trees of all requests end to end; `num_rows` is how many rows that makes.

    Nodes past `last_position` are never committed, but a position that exists must be given.
    """
    device = chain_tokens_C.device
    num_drafts_B = torch.zeros_like(chain_B) if trees is None else trees.sizes_B - 1
    num_rows_B = chain_B + num_drafts_B
    ends_B = num_rows_B.cumsum(0)
    starts_B = ends_B - num_rows_B
    rows_T = torch.arange(num_rows, device=device)
    request_T = torch.searchsorted(ends_B, rows_T, right=True)
    local_T = rows_T - starts_B[request_T]
    chain_T = chain_B[request_T]
    chain_row_T = (chain_B.cumsum(0) - chain_B)[request_T] + local_T.minimum(chain_T - 1)
    token_ids_T = chain_tokens_C[chain_row_T]
    positions_T = numbers_T = context_B[request_T] + local_T
    seen_BNN = None
    if trees is not None:
        seen_BNN = ancestors(trees.parents_BN, trees.max_depth)
        depths_BN = seen_BNN.sum(dim=-1) - 1
        node_T = (local_T - chain_T + 1).clamp(min=0)
        is_draft_T = local_T >= chain_T
        token_ids_T = torch.where(is_draft_T, trees.tokens_BN[request_T, node_T], token_ids_T)
        roots_T = context_B[request_T] + chain_T - 1
        positions_T = torch.where(is_draft_T, roots_T + depths_BN[request_T, node_T], positions_T)
    return TreePass(
        token_ids_T=token_ids_T,
        positions_T=positions_T.clamp(max=last_position) if last_position else positions_T,
        request_T=request_T,
        numbers_T=numbers_T,
        starts_B=starts_B,
        num_rows_B=num_rows_B,
        context_B=context_B,
        chain_B=chain_B,
        seen_BNN=seen_BNN,
        tables=tables,
        num_short=num_short,
        first_B=torch.zeros_like(context_B) if first_B is None else first_B,
    )


@dataclass(frozen=True, slots=True)
class FrontierPass:
    """One level of drafting: W nodes of every request, behind what the level before has stored."""

    token_ids_T: Tensor
    positions_T: Tensor
    context_B: Tensor
    """Committed tokens; scratch entries are numbered behind them, W for each level."""

    level: int
    """Levels stored in scratch when this pass is done, from 1."""

    visible_BWS: Tensor
    """Which scratch entries each node sees, itself included."""

    tables: BlockTables
    first_number: int = 0
    write_slots_T: Tensor | None = None
    """Slots of the newest entries where they are known already, and the same for all layers."""

    views: dict[int | None, PassView] = field(default_factory=dict, compare=False)

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]

    def view(self, window: int | None) -> PassView:
        if window not in self.views:
            self.views[window] = self._make_view(window)
        return self.views[window]

    def _make_view(self, window: int | None) -> PassView:
        slots_T = self.write_slots_T
        return PassView(
            self._newest_slots(window) if slots_T is None else slots_T,
            lambda: pad_frontier(self, window),
            lambda first: self._segments(window, first),
        )

    def _newest_slots(self, window: int | None) -> Tensor:
        num_requests, width, num_scratch = self.visible_BWS.shape
        device = self.context_B.device
        newest_W = torch.arange(num_scratch - width, num_scratch, device=device)
        requests_T = torch.arange(num_requests, device=device).repeat_interleave(width)
        numbers_T = (self.context_B[:, None] + newest_W).flatten()
        return self.tables.slots(window, requests_T, numbers_T)

    def paged(self, window: int | None) -> PagedRows:
        return PagedRows(
            rows=FrontierRows(self.visible_BWS.shape[1], self.level, self.first_number),
            context_B=self.context_B,
            positions_T=self.positions_T,
            seen_BRS=self.visible_BWS,
            table_BP=self.tables.by_window[window],
            block_size=self.tables.block_size,
        )

    def _segments(self, window: int | None, first_request: int) -> tuple[Segment, ...]:
        _, width, num_scratch = self.visible_BWS.shape
        device = self.context_B.device
        depths_S = torch.arange(self.level, device=device).repeat_interleave(width)
        segments = []
        for request, context in enumerate(self.context_B.tolist()):
            if request < first_request:
                continue
            first = self.first_number
            if window is not None:
                # The first of the scratch levels is at the position of the context's length.
                first = max(first, context - window + self.level)
            numbers_K = torch.arange(min(first, context), context + num_scratch, device=device)
            num_context = numbers_K.shape[0] - num_scratch
            sees_context = self.visible_BWS.new_ones(width, num_context)
            segments.append(
                Segment(
                    start=request * width,
                    key_slots_K=self.tables.slots(window, request, numbers_K),
                    key_positions_K=torch.cat([numbers_K[:num_context], context + depths_S]),
                    query_positions_Q=self.positions_T[request * width : (request + 1) * width],
                    visible_QK=torch.cat([sees_context, self.visible_BWS[request]], dim=1),
                )
            )
        return tuple(segments)


class Pass(Protocol):
    """What a network needs to know of a pass."""

    @property
    def token_ids_T(self) -> Tensor: ...

    @property
    def positions_T(self) -> Tensor: ...

    @property
    def num_tokens(self) -> int: ...

    def view(self, window: int | None) -> PassView: ...

    def paged(self, window: int | None) -> PagedRows | None:
        """What a kernel reads of it; None where keys do not lie in pages."""
