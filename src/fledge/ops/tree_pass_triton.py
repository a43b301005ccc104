"""Rows of newest tokens with trees below them in one launch, and their rows of the block tables.

Legend: B requests, N nodes of a tree with its root, T rows of the pass, P blocks of a table.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.paged_shape import power_of_two
from fledge.ops.table_rows_triton import copy_part, newest_token, parts

if TYPE_CHECKING:
    from fledge.ops.root_pass import Ends
    from fledge.ops.tree import TreeBatch
    from fledge.ops.tree_pass import TreeRowsFound


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "num_nodes",
        "last",
        "num_blocks",
        "row_stride",
        "last_position",
    ]
)
def _tree_kernel(
    place_rows_ptr,
    lens_ptr,
    fresh_ptr,
    newest_ptr,
    all_tables_ptr,
    drafts_ptr,
    parents_ptr,
    sizes_ptr,
    tokens_ptr,
    positions_ptr,
    request_ptr,
    numbers_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    rows_ptr,
    seen_ptr,
    table_ptr,
    num_requests,
    num_nodes,
    last,
    num_blocks,
    row_stride,
    last_position,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NODES: tl.constexpr,
    REQUESTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A part of a request's table; the first program of a request lays out its tree as well."""
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = copy_part(
        place_rows_ptr, all_tables_ptr, table_ptr, request, part, num_blocks, row_stride, COLUMNS
    )
    if part == 0:
        nodes_N, others = tl.arange(0, NODES), tl.arange(0, REQUESTS)
        is_node_N = nodes_N < num_nodes
        start = tl.sum(tl.load(sizes_ptr + others, mask=others < request, other=0), axis=0)
        is_real_N = nodes_N < tl.load(sizes_ptr + request)
        context = tl.load(lens_ptr + request) - 1
        newest = newest_token(fresh_ptr, newest_ptr, request, num_requests)
        tree = request * num_nodes
        tokens_N = tl.load(drafts_ptr + tree + nodes_N, mask=is_node_N, other=0)
        above_N = nodes_N.to(tl.int64)
        seen_NN = nodes_N[:, None] == nodes_N[None, :]
        for _ in range(DEPTH):
            above_N = tl.load(parents_ptr + tree + above_N, mask=is_node_N, other=0)
            seen_NN = seen_NN | (above_N[:, None] == nodes_N[None, :])
        depth_N = tl.sum(seen_NN.to(tl.int32), axis=1) - 1
        numbers_N = context + nodes_N
        blocks_N = tl.load(row_ptr + numbers_N // PAGE, mask=is_real_N, other=0)
        rows_N = start + nodes_N
        tl.store(tokens_ptr + rows_N, tl.where(nodes_N == 0, newest, tokens_N), mask=is_real_N)
        tl.store(positions_ptr + rows_N, tl.minimum(context + depth_N, last_position), is_real_N)
        tl.store(request_ptr + rows_N, request, mask=is_real_N)
        tl.store(numbers_ptr + rows_N, numbers_N, mask=is_real_N)
        tl.store(slots_ptr + rows_N, blocks_N * PAGE + numbers_N % PAGE, mask=is_real_N)
        tl.store(starts_ptr + request, start)
        tl.store(context_ptr + request, context)
        tl.store(rows_ptr + tree + nodes_N, tl.minimum(rows_N, last), mask=is_node_N)
        places_NN = (tree + nodes_N[:, None]) * num_nodes + nodes_N[None, :]
        is_pair_NN = is_node_N[:, None] & is_node_N[None, :]
        tl.store(seen_ptr + places_NN, seen_NN.to(tl.uint8), mask=is_pair_NN)


def lay_out(
    ends: "Ends",
    trees: "TreeBatch",
    num_rows: int,
    table_RP: Tensor,
    block_size: int,
    last_position: int,
) -> "TreeRowsFound":
    """The twin is the plain way of `make_steady_tree_pass`."""
    from fledge.ops.tree_pass import TreeRowsFound

    (num_requests, num_nodes), num_blocks = trees.tokens_BN.shape, table_RP.shape[1]
    new = ends.lens_B.new_empty
    # Lines of even lengths: kernels are compiled anew for memory that is aligned less.
    tokens_T, positions_T, request_T, numbers_T, slots_T = new(5, num_rows + num_rows % 2)
    starts_B, context_B = new(2, num_requests + num_requests % 2)
    found = TreeRowsFound(
        token_ids_T=tokens_T[:num_rows],
        positions_T=positions_T[:num_rows],
        request_T=request_T[:num_rows],
        numbers_T=numbers_T[:num_rows],
        slots_T=slots_T[:num_rows],
        starts_B=starts_B[:num_requests],
        context_B=context_B[:num_requests],
        rows_BN=new(num_requests, num_nodes),
        seen_BNN=new(num_requests, num_nodes, num_nodes, dtype=torch.bool),
        table_BP=new(num_requests, num_blocks),
    )
    grid, columns = parts(num_requests, table_RP)
    deepest = num_nodes - 1 if trees.max_depth is None else min(trees.max_depth, num_nodes - 1)
    _tree_kernel[grid](
        *ends,
        table_RP,
        trees.tokens_BN.contiguous(),
        trees.parents_BN.contiguous(),
        trees.sizes_B,
        *found._replace(seen_BNN=found.seen_BNN.view(torch.uint8)),
        num_requests,
        num_nodes,
        num_rows - 1,
        num_blocks,
        table_RP.stride(0),
        last_position,
        PAGE=block_size,
        COLUMNS=columns,
        NODES=max(16, power_of_two(num_nodes)),
        REQUESTS=max(16, power_of_two(num_requests)),
        DEPTH=deepest,
    )
    return found
