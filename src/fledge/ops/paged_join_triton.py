"""The second kernel of paged attention: joins what programs that share tiles have left.

A program has a few members of a tile and goes through the segments of its keys, from the oldest to
the newest. Behind 32k tokens that was faster than one program for a whole tile. Where a tile lies
within one segment there is nothing to join.

Legend: C members of a program, each one row with one query head; T rows of the pass, H query heads,
D head size.
"""

from collections.abc import Sequence
from dataclasses import astuple

import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.attention import AttentionSpec
from fledge.ops.launch_chain_triton import chained, wait_for_inputs
from fledge.ops.paged_extent_triton import extent, lengths_of, locate
from fledge.ops.paged_rows import FrontierRows, PagedRows
from fledge.ops.paged_segments_triton import join, segment_border
from fledge.ops.paged_shape import PagedShape, block_of, requests_at_once
from fledge.ops.paged_tile_triton import finish


@triton.jit(
    do_not_specialize=[
        "factor",
        "window",
        "num_requests",
        "width",
        "level",
        "first_number",
        "num_parts",
    ]
)
def _join_kernel(
    parts_ptr,
    max_ptr,
    sum_ptr,
    sinks_ptr,
    out_ptr,
    starts_ptr,
    num_rows_ptr,
    chain_ptr,
    first_ptr,
    context_ptr,
    factor,
    window,
    num_requests,
    tiles_each,
    width,
    level,
    first_number,
    num_parts,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    SEGMENT: tl.constexpr,
    REQUESTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FRONTIER: tl.constexpr,
    IS_LOCATED: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    ROWS: tl.constexpr = M // GROUP
    place, chunk = tl.program_id(0), tl.program_id(1)
    tile, group = place // NUM_GROUPS, place % NUM_GROUPS
    if IS_LOCATED:
        request, first_tile = locate(tile, starts_ptr, num_requests, ROWS, REQUESTS)
    else:
        request, first_tile = tile // tiles_each, tile % tiles_each
    context = tl.load(context_ptr + request).to(tl.int32)
    start, num_rows, chain, first = lengths_of(
        request, starts_ptr, num_rows_ptr, chain_ptr, first_ptr, width, first_number, IS_FRONTIER
    )
    members_C = chunk * C + tl.arange(0, C)
    if IS_CHAINED:
        wait_for_inputs()
    for number in range(first_tile, tl.cdiv(num_rows, ROWS), tiles_each):
        origin, low, _, _, end = extent(
            number * ROWS, num_rows, chain, context, first, window, width, level, ROWS, N,
            HAS_WINDOW, IS_FRONTIER,
        )  # fmt: skip
        border, after_first = segment_border(low + 1 - origin, SEGMENT)
        local_C, head_C = number * ROWS + members_C // GROUP, group * GROUP + members_C % GROUP
        is_row_C = (local_C < num_rows) & (members_C < ROWS * GROUP)
        is_first_there = number * ROWS + chunk * C // GROUP < num_rows
        if (origin + border < end) & is_first_there:
            place_C = (start + local_C).to(tl.int64) * (NUM_GROUPS * GROUP) + head_C
            _, after_last = segment_border(end - origin, SEGMENT)
            acc_CD, max_C, sum_C = _join_members(
                parts_ptr, max_ptr, sum_ptr, place_C * num_parts, is_row_C, after_first - 1,
                after_last, factor, C, SIZE, BLOCK,
            )  # fmt: skip
            finish(
                acc_CD, max_C, sum_C, sinks_ptr + head_C, out_ptr, place_C, is_row_C, factor,
                SIZE, BLOCK, HAS_SINKS,
            )  # fmt: skip


@triton.jit
def _join_members(
    parts_ptr,
    max_ptr,
    sum_ptr,
    part_C,
    is_row_C,
    begin,
    end,
    factor,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Segments from `begin` to `end`, four at once and fetched three steps before."""
    dims = tl.arange(0, BLOCK)
    is_dim = (dims < SIZE)[None, :]
    max_C, sum_C = tl.full([C], float("-inf"), tl.float32), tl.zeros([C], tl.float32)
    acc_CD = tl.zeros([C, BLOCK], tl.float32)
    for first in tl.range(begin, end, 4, num_stages=4):
        for one in tl.static_range(4):
            segment_C = tl.full([C], first + one, tl.int32)
            is_part_C, at_C = is_row_C & (segment_C < end), part_C + segment_C
            # Other processors wrote them: L1 does not have them.
            part_ptrs = parts_ptr + (at_C * SIZE)[:, None] + dims[None, :]
            part_CD = tl.load(
                part_ptrs, mask=is_part_C[:, None] & is_dim, other=0.0, cache_modifier=".cg"
            )
            part_max_C = tl.load(
                max_ptr + at_C, mask=is_part_C, other=float("-inf"), cache_modifier=".cg"
            )
            part_sum_C = tl.load(sum_ptr + at_C, mask=is_part_C, other=0.0, cache_modifier=".cg")
            acc_CD, max_C, sum_C = join(
                acc_CD, max_C, sum_C, part_CD, part_max_C, part_sum_C, factor
            )
    return acc_CD, max_C, sum_C


def join_left(
    rows: PagedRows,
    spec: AttentionSpec,
    shape: PagedShape,
    left: Sequence[Tensor],
    out_THD: Tensor,
    num_groups: int,
    factor: float,
) -> None:
    """Fill in `out_THD` from outputs, maxima and sums of all segments."""
    tree, frontier = rows.lengths
    num_heads, size = out_THD.shape[1:]
    members = shape.tile // 16
    _join_kernel[(shape.num_tiles * num_groups, shape.tile // members)](
        *left,
        out_THD if spec.sinks_H is None else spec.sinks_H,
        out_THD,
        tree.starts_B,
        tree.num_rows_B,
        tree.chain_B,
        tree.first_B,
        rows.context_B,
        factor,
        spec.window or 0,
        rows.num_requests,
        shape.tiles_each,
        *astuple(frontier),
        shape.num_parts,
        NUM_GROUPS=num_groups,
        GROUP=num_heads // num_groups,
        SIZE=size,
        BLOCK=block_of(size),
        M=shape.tile,
        N=shape.keys,
        C=members,
        SEGMENT=shape.segment,
        REQUESTS=requests_at_once(rows.num_requests),
        HAS_WINDOW=spec.window is not None,
        HAS_SINKS=spec.sinks_H is not None,
        IS_FRONTIER=isinstance(rows.rows, FrontierRows),
        IS_LOCATED=shape.is_located,
        **chained(out_THD.device),
        num_warps=members,
    )
