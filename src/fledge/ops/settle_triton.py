"""What follows from a walk in one launch, a program for each place.

Legend: B places, N nodes, L levels.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fledge.ops.launch_chain_triton import chained, wait_for_inputs
from fledge.ops.paged_shape import power_of_two

if TYPE_CHECKING:
    from fledge.ops.accept import Walk
    from fledge.ops.settle import Standing
    from fledge.ops.tree import TreeBatch


@triton.jit(do_not_specialize=["spare_row", "num_places", "num_nodes", "num_levels"])
def _settle_kernel(
    tokens_ptr,
    nodes_ptr,
    lengths_ptr,
    is_failed_ptr,
    is_copied_ptr,
    parents_ptr,
    sizes_ptr,
    place_rows_ptr,
    lens_ptr,
    fresh_ptr,
    said_ptr,
    newest_ptr,
    facts_ptr,
    spare_row,
    num_places,
    num_nodes,
    num_levels,
    NODES: tl.constexpr,
    LEVELS: tl.constexpr,
    FIRST: tl.constexpr,
    HAS_COPIES: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    if IS_CHAINED:
        wait_for_inputs()
    place, levels_L, nodes_N = tl.program_id(0), tl.arange(0, LEVELS), tl.arange(0, NODES)
    length = tl.load(lengths_ptr + place)
    is_failed = tl.load(is_failed_ptr + place).to(tl.int64)
    is_copied = is_failed * 0
    if HAS_COPIES:
        is_copied = tl.load(is_copied_ptr + place).to(tl.int64)
    num_real = tl.load(sizes_ptr + place)
    is_there = tl.load(place_rows_ptr + place) != spare_row
    before, said = tl.load(lens_ptr + place), tl.load(said_ptr + place)
    is_draft_N = (nodes_N > 0) & (nodes_N < num_real) & (nodes_N < num_nodes)
    parents_N = tl.load(parents_ptr + place * num_nodes + nodes_N, mask=is_draft_N, other=-1)
    is_level_L = levels_L < num_levels
    tokens_L = tl.load(tokens_ptr + place * num_levels + levels_L, mask=is_level_L, other=0)
    last = tl.load(nodes_ptr + place * num_levels + length - 1)
    has_more = tl.max((is_draft_N & (parents_N == last)).to(tl.int64), axis=0)
    tl.store(facts_ptr + place, length)
    tl.store(facts_ptr + num_places + place, length - 1 + has_more)
    tl.store(facts_ptr + 2 * num_places + place, is_failed)
    tl.store(facts_ptr + 3 * num_places + place, is_copied)
    tl.store(facts_ptr + (FIRST + levels_L) * num_places + place, tokens_L, mask=is_level_L)
    tl.store(newest_ptr + levels_L * num_places + place, tokens_L, mask=is_level_L)
    tl.store(lens_ptr + place, before + tl.where(is_there, length, 0))
    tl.store(said_ptr + place, said + length)
    tl.store(fresh_ptr + place, tl.where(is_there, length, 1))


def settle_places(walk: "Walk", trees: "TreeBatch", standing: "Standing", spare_row: int) -> None:
    """The twin is `settle_plain`."""
    from fledge.ops.settle import FIRST_TOKEN

    num_places, num_levels = walk.tokens_BL.shape
    num_nodes = trees.max_size
    has_copies = trees.is_copied_B is not None
    # What a kernel does not look at still needs a pointer.
    is_copied_B = walk.failed_B if trees.is_copied_B is None else trees.is_copied_B
    _settle_kernel[(num_places,)](
        walk.tokens_BL.contiguous(),
        walk.nodes_BL.contiguous(),
        walk.lengths_B,
        walk.failed_B.view(torch.uint8),
        is_copied_B.view(torch.uint8),
        trees.parents_BN.contiguous(),
        trees.sizes_B,
        standing.rows_B,
        standing.lens_B,
        standing.fresh_B,
        standing.said_B,
        standing.tokens_MB,
        standing.facts_XB,
        spare_row,
        num_places,
        num_nodes,
        num_levels,
        NODES=max(16, power_of_two(num_nodes)),
        LEVELS=max(16, power_of_two(num_levels)),
        FIRST=FIRST_TOKEN,
        HAS_COPIES=has_copies,
        **chained(standing.lens_B.device),
        num_warps=1,
    )
