"""Attention over paged memory in one launch for all requests of a pass.

A program owns one tile: some rows of one request, for all query heads that share one key head, so
that every key is read once for all of them. Which request a tile belongs to, how far its rows see
and where its keys lie is read on the device; the host knows only how many rows and requests there
are. Where tiles are too few to fill the device, the keys of a tile are split over several programs,
if it has many. The program that is done last puts the parts together, or a second kernel does where
contexts may be long.

    tile   request  rows           keys of a tile          numbers  0 ... context+first row | rest
     0        a     a0 a1 a2 a3                            seen     by every row            | masked
     1        a     a4                                     segments [ 0 )[ 1 )[ 2 )[ 3 )
     2        b     b0

Scores, sums and outputs are float32, also for float32 inputs (no TF32). What a row comes to has the
same bits in any tile and however its keys are split: it depends on the row's own keys alone. The
twin is the loop over `PassView.segments` with `attend_plain`.

Legend: M rows of a tile times query heads of its key head, N keys of a step, D head size, B
requests, T rows of the pass, H query heads, G key heads, S slots.
"""

from dataclasses import astuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.attention import AttentionSpec
from fledge.ops.launch_chain_triton import chained, wait_for_inputs
from fledge.ops.paged_extent_triton import extent, lengths_of, locate
from fledge.ops.paged_join_triton import join_left
from fledge.ops.paged_rows import FrontierRows, PagedRows
from fledge.ops.paged_segments_triton import counts_for, leave_or_join, split_range
from fledge.ops.paged_shape import PagedShape, block_of, paged_shape, requests_at_once
from fledge.ops.paged_tile_triton import find_slots, finish, load_rows, read_tile

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=[
        "soft_cap",
        "factor",
        "window",
        "num_requests",
        "width",
        "level",
        "first_number",
        "num_splits",
        "num_parts",
    ]
)
def _attend_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    sinks_ptr,
    out_ptr,
    parts_ptr,
    max_ptr,
    sum_ptr,
    counts_ptr,
    table_ptr,
    starts_ptr,
    num_rows_ptr,
    chain_ptr,
    first_ptr,
    context_ptr,
    positions_ptr,
    seen_ptr,
    scale,
    soft_cap,
    factor,
    window,
    num_requests,
    tiles_each,
    width,
    level,
    first_number,
    num_splits,
    num_parts,
    query_stride_t,
    query_stride_h,
    key_stride_s,
    key_stride_g,
    value_stride_s,
    value_stride_g,
    table_stride,
    seen_stride_b,
    seen_stride_r,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SEGMENT: tl.constexpr,
    REQUESTS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FRONTIER: tl.constexpr,
    IS_LOCATED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_PARTED: tl.constexpr,
    JOINS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    ROWS: tl.constexpr = M // GROUP
    place, split = tl.program_id(0), tl.program_id(1)
    tile, group = place // NUM_GROUPS, place % NUM_GROUPS
    if IS_LOCATED:
        request, first_tile = locate(tile, starts_ptr, num_requests, ROWS, REQUESTS)
    else:
        request, first_tile = tile // tiles_each, tile % tiles_each
    context = tl.load(context_ptr + request).to(tl.int32)
    start, num_rows, chain, first = lengths_of(
        request, starts_ptr, num_rows_ptr, chain_ptr, first_ptr, width, first_number, IS_FRONTIER
    )
    # A request may bring more rows than the host counted on: its programs go on.
    for number in range(first_tile, tl.cdiv(num_rows, ROWS), tiles_each):
        origin, low, oldest, common, end = extent(
            number * ROWS, num_rows, chain, context, first, window, width, level, ROWS, N,
            HAS_WINDOW, IS_FRONTIER,
        )  # fmt: skip
        begin, high, num_live = split_range(low, end, origin, split, num_splits, SEGMENT, IS_SPLIT)
        if split < num_live:
            slots_N = find_slots(
                table_ptr + request * table_stride, begin, oldest, high, PAGE, N, HAS_WINDOW
            )
            if IS_CHAINED:
                # Lengths and tables are older than the kernel before; queries and keys are not.
                wait_for_inputs()
            members_M = tl.arange(0, M)
            local_M, head_M = number * ROWS + members_M // GROUP, group * GROUP + members_M % GROUP
            is_row_M = (local_M < num_rows) & (members_M < ROWS * GROUP)
            row_M = (start + local_M).to(tl.int64)
            place_M = row_M * (NUM_GROUPS * GROUP) + head_M
            query_MD = load_rows(
                query_ptr + head_M[:, None] * query_stride_h, row_M, is_row_M, query_stride_t,
                KEY_SIZE, KEY_BLOCK, False,
            )  # fmt: skip
            position_M = tl.load(positions_ptr + row_M, mask=is_row_M, other=0).to(tl.int32)
            acc_MD, max_M, sum_M, segment = read_tile(
                query_MD, slots_N, local_M, is_row_M, position_M, place_M * num_parts, context,
                chain, origin, begin, oldest, common, high, keys_ptr + group * key_stride_g,
                values_ptr + group * value_stride_g, table_ptr + request * table_stride,
                positions_ptr + start, seen_ptr + request * seen_stride_b, parts_ptr, max_ptr,
                sum_ptr, scale, soft_cap, factor, window, width, key_stride_s, value_stride_s,
                seen_stride_r, KEY_SIZE, VALUE_SIZE, KEY_BLOCK, VALUE_BLOCK, PAGE, M, N, SEGMENT,
                HAS_SEEN, HAS_WINDOW, HAS_SOFT_CAP, IS_FRONTIER, IS_SPLIT, IS_PARTED,
            )  # fmt: skip
            is_whole = True
            if IS_SPLIT:
                # Tiles of a pass are counted as `locate` does: each has its own number.
                counted = (start // ROWS + request + number) * NUM_GROUPS + group
                acc_MD, max_M, sum_M, is_whole = leave_or_join(
                    acc_MD, max_M, sum_M, parts_ptr, max_ptr, sum_ptr, counts_ptr + counted,
                    place_M * num_parts, is_row_M, segment, begin < high, low - origin,
                    end - origin, num_live, factor, M, VALUE_SIZE, VALUE_BLOCK, SEGMENT, JOINS,
                )  # fmt: skip
            if is_whole:
                finish(
                    acc_MD, max_M, sum_M, sinks_ptr + head_M, out_ptr, place_M, is_row_M, factor,
                    VALUE_SIZE, VALUE_BLOCK, HAS_SINKS,
                )  # fmt: skip
    if IS_CHAINED:  # without keys too: who comes next counts on what was before this kernel
        wait_for_inputs()


def attend_paged(
    rows: PagedRows, query_THD: Tensor, keys_SGD: Tensor, values_SGD: Tensor, spec: AttentionSpec
) -> Tensor:
    """Attention of all rows over the pool's keys, theirs included; returns [T, H, D]."""
    num_heads, key_size = query_THD.shape[1:]
    num_groups, value_size = values_SGD.shape[1:]
    if query_THD.stride(2) != 1:
        query_THD = query_THD.contiguous()
    shape = paged_shape(
        rows,
        group=num_heads // num_groups,
        num_groups=num_groups,
        head_size=max(key_size, value_size),
        dtype=query_THD.dtype,
    )
    out_THD = query_THD.new_empty(rows.num_rows, num_heads, value_size)
    _launch(rows, query_THD, keys_SGD, values_SGD, spec, shape, out_THD)
    return out_THD


def _launch(
    rows: PagedRows,
    query_THD: Tensor,
    keys_SGD: Tensor,
    values_SGD: Tensor,
    spec: AttentionSpec,
    shape: PagedShape,
    out_THD: Tensor,
) -> None:
    seen, context = rows.seen_BRS, rows.context_B
    if seen is not None and seen.stride(2) != 1:
        seen = seen.contiguous()
    tree, frontier = rows.lengths
    num_groups, value_size = values_SGD.shape[1:]
    left, factor = _memory_for_parts(out_THD, shape), (spec.soft_cap or spec.scale) * _LOG2_E.value
    _attend_kernel[(shape.num_tiles * num_groups, shape.num_splits)](
        query_THD,
        keys_SGD,
        values_SGD,
        query_THD if spec.sinks_H is None else spec.sinks_H,
        out_THD,
        *left,
        rows.table_BP,
        tree.starts_B,
        tree.num_rows_B,
        tree.chain_B,
        tree.first_B,
        context,
        rows.positions_T,
        context if seen is None else seen.view(torch.uint8),
        spec.scale * _LOG2_E.value,
        (spec.soft_cap or 0.0) * _LOG2_E.value,
        factor,
        spec.window or 0,
        rows.num_requests,
        shape.tiles_each,
        *astuple(frontier),
        shape.num_splits,
        shape.num_parts,
        *query_THD.stride()[:2],
        *keys_SGD.stride()[:2],
        *values_SGD.stride()[:2],
        rows.table_BP.stride(0),
        *((0, 0) if seen is None else seen.stride()[:2]),
        NUM_GROUPS=num_groups,
        GROUP=query_THD.shape[1] // num_groups,
        KEY_SIZE=query_THD.shape[2],
        VALUE_SIZE=value_size,
        KEY_BLOCK=block_of(query_THD.shape[2]),
        VALUE_BLOCK=block_of(value_size),
        PAGE=rows.block_size,
        M=shape.tile,
        N=shape.keys,
        SEGMENT=shape.segment,
        REQUESTS=requests_at_once(rows.num_requests),
        HAS_SEEN=seen is not None,
        HAS_WINDOW=spec.window is not None,
        HAS_SOFT_CAP=spec.soft_cap is not None,
        HAS_SINKS=spec.sinks_H is not None,
        IS_FRONTIER=isinstance(rows.rows, FrontierRows),
        IS_LOCATED=shape.is_located,
        IS_SPLIT=shape.num_splits > 1,
        IS_PARTED=shape.is_parted,
        JOINS=shape.joins,
        **chained(query_THD.device),
        **shape.options,
    )
    if shape.num_splits > 1 and not shape.joins:
        join_left(rows, spec, shape, left[:3], out_THD, num_groups, factor)


def _memory_for_parts(out_THD: Tensor, shape: PagedShape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, maxima and sums of all segments, and how many programs of a tile have come."""
    if shape.num_splits == 1:
        # What a kernel does not look at still needs a pointer.
        return out_THD, out_THD, out_THD, out_THD
    places = (*out_THD.shape[:2], shape.num_parts)
    parts = out_THD.new_empty(*places, out_THD.shape[2], dtype=torch.float32)
    maxima, sums = out_THD.new_empty(2, *places, dtype=torch.float32)
    return parts, maxima, sums, counts_for(out_THD.device)
