"""The pass of a cycle with drafts: the newest token of each request, and its tree below.

Legend: B requests, N nodes of a tree with its root, T rows of the pass, P blocks of a table.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels
from fledge.ops.paged import BlockTables, TreePass, make_tree_pass
from fledge.ops.root_pass import Ends, parts_of
from fledge.ops.tree import TreeBatch

_MOST_NODES = 128
"""Of a tree that one program lays out."""


class TreeRowsFound(NamedTuple):
    """What a kernel makes of ends and trees."""

    token_ids_T: Tensor
    positions_T: Tensor
    request_T: Tensor
    numbers_T: Tensor
    slots_T: Tensor
    starts_B: Tensor
    context_B: Tensor
    rows_BN: Tensor
    seen_BNN: Tensor
    table_BP: Tensor


class SteadyTreePass(NamedTuple):
    packed: TreePass
    rows_BN: Tensor
    """Row of each node; meaningless behind a tree's real nodes."""


def make_steady_tree_pass(
    ends: Ends, trees: TreeBatch, all_tables: BlockTables, last_position: int
) -> SteadyTreePass:
    """A pass over newest tokens and trees; nodes past `last_position` are never committed."""
    num_requests, num_rows = trees.num_requests, trees.num_requests + trees.num_drafts

    def plain() -> SteadyTreePass:
        newest_1B = ends.tokens_MB.gather(0, ends.fresh_B[None] - 1)
        packed = make_tree_pass(
            chain_tokens_C=newest_1B[0],
            chain_B=torch.ones_like(ends.lens_B),
            context_B=ends.lens_B - 1,
            trees=trees,
            num_rows=num_rows,
            tables=all_tables[ends.rows_B],
            num_short=num_requests,
            last_position=last_position,
        )
        return SteadyTreePass(packed, packed.node_rows(trees.max_size))

    # With tables for several windows a row has several slots.
    has_one = len(all_tables.by_window) == 1 and trees.max_size <= _MOST_NODES
    if not (has_one and uses_kernels(ends.lens_B)):
        return plain()
    ((window, table_RP),) = all_tables.by_window.items()

    def fused() -> SteadyTreePass:
        from fledge.ops.tree_pass_triton import lay_out

        block_size = all_tables.block_size
        with on_device(ends.lens_B):
            found = lay_out(ends, trees, num_rows, table_RP, block_size, last_position)
        ones_B, zeros_B = _constants(num_requests, ends.lens_B.device)
        packed = TreePass(
            token_ids_T=found.token_ids_T,
            positions_T=found.positions_T,
            request_T=found.request_T,
            numbers_T=found.numbers_T,
            starts_B=found.starts_B,
            num_rows_B=trees.sizes_B,
            context_B=found.context_B,
            chain_B=ones_B,
            seen_BNN=found.seen_BNN,
            tables=BlockTables(block_size, {window: found.table_BP}),
            num_short=num_requests,
            first_B=zeros_B,
            write_slots_T=found.slots_T,
        )
        return SteadyTreePass(packed, found.rows_BN)

    def is_right(found: SteadyTreePass) -> bool:
        expected = plain()
        return torch.equal(found.rows_BN, expected.rows_BN) and all(
            map(torch.equal, parts_of(found.packed, window), parts_of(expected.packed, window))
        )

    kind = (num_requests.bit_length(), trees.max_size, trees.max_depth)
    return run_kernel("rows of trees", fused, plain, kind=kind, is_right=is_right)


@cache
def _constants(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ones and zeros. Made once and never let go: a captured graph may have read them."""
    ones_B = torch.ones(size, dtype=torch.long, device=device)
    return ones_B, torch.zeros_like(ones_B)
