"""Attention over paged memory in one launch for all requests of a pass.

A program owns one tile: some rows of one request, for all query heads that share one key head, so
that every key is read once for all of them. Which request a tile belongs to, how far its rows see
and where its keys lie is read on the device; the host knows only how many rows and requests there
are. Where tiles are too few to fill the device, the keys of a tile are split over several programs,
and a second kernel puts their parts together.

    tile   request  rows           keys of a tile          numbers  0 ... context+first row | rest
     0        a     a0 a1 a2 a3                            seen     by every row            | masked
     1        a     a4                                     split    [ 0 )[ 1 )[ 2 )[ 3 )
     2        b     b0

Scores, sums and outputs are float32, also for float32 inputs (no TF32). The twin is the loop over
`PassView.segments` with `attend_plain`.

Legend: M rows of a tile times query heads of its key head, N keys of a step, D head size, B
requests, T rows of the pass, H query heads, G key heads, S slots.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.attention import AttentionSpec
from fledge.ops.paged_rows import FrontierRows, PagedRows, TreeRows
from fledge.ops.paged_shape import FEWEST_KEYS, PagedShape, paged_shape, power_of_two
from fledge.ops.paged_tile_triton import extent, locate, read_tile

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=[
        "soft_cap",
        "window",
        "num_requests",
        "width",
        "level",
        "first_number",
        "num_splits",
    ]
)
def _attend_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    sinks_ptr,
    out_ptr,
    max_ptr,
    sum_ptr,
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
    window,
    num_requests,
    width,
    level,
    first_number,
    num_splits,
    query_stride_t,
    query_stride_h,
    key_stride_s,
    key_stride_g,
    value_stride_s,
    value_stride_g,
    table_stride,
    seen_stride_b,
    seen_stride_r,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FEWEST: tl.constexpr,
    REQUESTS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_FULL: tl.constexpr,
    IS_FRONTIER: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    ROWS: tl.constexpr = M // GROUP
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if IS_FRONTIER:
        num_tiles = tl.cdiv(width, ROWS)
        request, first_row = tile // num_tiles, tile % num_tiles * ROWS
        start, num_rows, chain, first = request * width, width, 0, first_number
    else:
        request, before = locate(tile, starts_ptr, num_requests, ROWS, REQUESTS)
        first_row, start = before * ROWS, tl.load(starts_ptr + request)
        num_rows, chain = tl.load(num_rows_ptr + request), tl.load(chain_ptr + request)
        first = tl.load(first_ptr + request)
    if first_row >= num_rows:
        return
    context = tl.load(context_ptr + request)
    low, full, high = extent(
        first_row, num_rows, chain, context, first, window, width, level, split, num_splits,
        ROWS, N, FEWEST, HAS_WINDOW, HAS_FULL, IS_FRONTIER,
    )  # fmt: skip
    members_M = tl.arange(0, M)
    local_M, head_M = first_row + members_M // GROUP, group * GROUP + members_M % GROUP
    is_row_M = (local_M < num_rows) & (members_M < ROWS * GROUP)
    row_M = start + local_M
    place_M = (row_M * (tl.num_programs(1) * GROUP) + head_M) * num_splits + split
    max_M, sum_M = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    if IS_SPLIT:  # noqa: SIM102 (known when the kernel is compiled)
        if low >= high:
            tl.store(max_ptr + place_M, max_M, mask=is_row_M)
            return
    if HAS_SINKS:
        # A key without a value.
        sinks_M = tl.load(sinks_ptr + head_M, mask=is_row_M, other=0.0).to(tl.float32) * _LOG2_E
        max_M, sum_M = tl.where(split == 0, sinks_M, max_M), sum_M + (split == 0)
    dims = tl.arange(0, KEY_BLOCK)
    query_ptrs = query_ptr + row_M[:, None] * query_stride_t + head_M[:, None] * query_stride_h
    is_query_MD = is_row_M[:, None] & (dims < KEY_SIZE)[None, :]
    query_MD = tl.load(query_ptrs + dims[None, :], mask=is_query_MD, other=0.0)
    position_M = tl.load(positions_ptr + row_M, mask=is_row_M, other=0)
    acc_MD, max_M, sum_M = read_tile(
        query_MD, max_M, sum_M, local_M, is_row_M, position_M, context, chain, low, full, high,
        keys_ptr + group * key_stride_g, values_ptr + group * value_stride_g,
        table_ptr + request * table_stride, positions_ptr + start,
        seen_ptr + request * seen_stride_b, scale, soft_cap, window, width,
        key_stride_s, value_stride_s, seen_stride_r, KEY_SIZE, VALUE_SIZE, KEY_BLOCK, VALUE_BLOCK,
        PAGE, M, N, HAS_SEEN, HAS_WINDOW, HAS_SOFT_CAP, HAS_FULL, IS_FRONTIER,
    )  # fmt: skip
    if IS_SPLIT:
        tl.store(max_ptr + place_M, max_M, mask=is_row_M)
        tl.store(sum_ptr + place_M, sum_M, mask=is_row_M)
    else:
        acc_MD = acc_MD / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    out_dims = tl.arange(0, VALUE_BLOCK)
    is_out_MD = is_row_M[:, None] & (out_dims < VALUE_SIZE)[None, :]
    out_ptrs = out_ptr + place_M[:, None] * VALUE_SIZE + out_dims[None, :]
    tl.store(out_ptrs, acc_MD.to(out_ptr.dtype.element_ty), mask=is_out_MD)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    parts_ptr,
    max_ptr,
    sum_ptr,
    out_ptr,
    num_splits,
    SPLITS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """One output row and head of all splits; those that had no keys have a maximum of -inf."""
    place = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, VALUE_BLOCK)
    places = place * num_splits + splits
    max_S = tl.load(max_ptr + places, mask=splits < num_splits, other=float("-inf"))
    is_part_S = max_S > float("-inf")
    largest = tl.max(max_S, axis=0)
    weight_S = tl.exp2(max_S - tl.where(largest > float("-inf"), largest, 0.0))
    sum_S = tl.load(sum_ptr + places, mask=is_part_S, other=0.0)
    is_part_SD = is_part_S[:, None] & (dims < VALUE_SIZE)[None, :]
    part_ptrs = parts_ptr + places[:, None] * VALUE_SIZE + dims[None, :]
    parts_SD = tl.load(part_ptrs, mask=is_part_SD, other=0.0)
    total = tl.sum(weight_S * sum_S, axis=0)
    out_D = tl.sum(weight_S[:, None] * parts_SD, axis=0) / tl.where(total > 0, total, 1.0)
    out_ptrs = out_ptr + place * VALUE_SIZE + dims
    tl.store(out_ptrs, out_D.to(out_ptr.dtype.element_ty), mask=dims < VALUE_SIZE)


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
    if shape.num_splits == 1:
        _launch(rows, query_THD, keys_SGD, values_SGD, spec, shape, out_THD, out_THD, out_THD)
        return out_THD
    places = (rows.num_rows, num_heads, shape.num_splits)
    parts = query_THD.new_empty(*places, value_size, dtype=torch.float32)
    maxima, sums = query_THD.new_empty(2, *places, dtype=torch.float32)
    _launch(rows, query_THD, keys_SGD, values_SGD, spec, shape, parts, maxima, sums)
    _combine_kernel[(rows.num_rows * num_heads,)](
        parts,
        maxima,
        sums,
        out_THD,
        shape.num_splits,
        SPLITS=8 if shape.num_splits <= 8 else 64,
        VALUE_SIZE=value_size,
        VALUE_BLOCK=_block(value_size),
    )
    return out_THD


def _launch(
    rows: PagedRows,
    query_THD: Tensor,
    keys_SGD: Tensor,
    values_SGD: Tensor,
    spec: AttentionSpec,
    shape: PagedShape,
    out: Tensor,
    maxima: Tensor,
    sums: Tensor,
) -> None:
    seen, context = rows.seen_BRS, rows.context_B
    if seen is not None and seen.stride(2) != 1:
        seen = seen.contiguous()
    # What a kernel does not look at still needs a pointer.
    tree, frontier = TreeRows(context, context, context, context), FrontierRows(1, 1, 0)
    if isinstance(rows.rows, FrontierRows):
        frontier = rows.rows
    else:
        tree = rows.rows
    num_groups, value_size = values_SGD.shape[1:]
    _attend_kernel[(shape.num_tiles, num_groups, shape.num_splits)](
        query_THD,
        keys_SGD,
        values_SGD,
        query_THD if spec.sinks_H is None else spec.sinks_H,
        out,
        maxima,
        sums,
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
        spec.window or 0,
        rows.num_requests,
        frontier.width,
        frontier.level,
        frontier.first_number,
        shape.num_splits,
        *query_THD.stride()[:2],
        *keys_SGD.stride()[:2],
        *values_SGD.stride()[:2],
        rows.table_BP.stride(0),
        *((0, 0) if seen is None else seen.stride()[:2]),
        GROUP=query_THD.shape[1] // num_groups,
        KEY_SIZE=query_THD.shape[2],
        VALUE_SIZE=value_size,
        KEY_BLOCK=_block(query_THD.shape[2]),
        VALUE_BLOCK=_block(value_size),
        PAGE=rows.block_size,
        M=shape.tile,
        N=shape.keys,
        FEWEST=FEWEST_KEYS,
        REQUESTS=32 if rows.num_requests <= 32 else max(256, power_of_two(rows.num_requests)),
        HAS_SEEN=seen is not None,
        HAS_WINDOW=spec.window is not None,
        HAS_SOFT_CAP=spec.soft_cap is not None,
        HAS_SINKS=spec.sinks_H is not None,
        # Without masks for keys that all rows see; float32 products are long code, one loop will do
        HAS_FULL=spec.window is None and query_THD.dtype != torch.float32,
        IS_FRONTIER=isinstance(rows.rows, FrontierRows),
        IS_SPLIT=shape.num_splits > 1,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def _block(size: int) -> int:
    """Columns of a tile for rows of this size: tensor cores take powers of two from 16 on."""
    return max(16, power_of_two(size))
