"""One tile of paged attention: a running softmax over its keys.

The parts of `paged_attention_triton`. Scores are logarithms to base 2.

Legend: M rows of a tile times query heads of its key head, N keys of a step, D head size.
"""

import triton
import triton.language as tl

from fledge.ops.paged_extent_triton import is_visible
from fledge.ops.paged_segments_triton import join, leave, segment_border, sum_columns

_TANH_IS_ONE = tl.constexpr(60.0)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def is_read(numbers_N, oldest, high, HAS_WINDOW: tl.constexpr):
    """Which keys of a step are there: without a window, the first step begins with the oldest."""
    is_key_N = numbers_N < high
    return is_key_N & (numbers_N >= oldest) if HAS_WINDOW else is_key_N


@triton.jit
def find_slots(
    table_ptr,
    begin,
    oldest,
    high,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Slots of the numbers from `begin` on that are not below `oldest`, but below `high`."""
    numbers_N = begin + tl.arange(0, N)
    is_key_N = is_read(numbers_N, oldest, high, HAS_WINDOW)
    blocks_N = tl.load(table_ptr + numbers_N // PAGE, mask=is_key_N, other=0)
    return blocks_N.to(tl.int32) * PAGE + numbers_N % PAGE


@triton.jit
def load_rows(
    pool_ptr,
    slots_N,
    is_key_N,
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Rows of some slots, [N, BLOCK]; what is masked is 0, never what happens to lie there."""
    dims = tl.arange(0, BLOCK)
    ptrs = pool_ptr + (slots_N.to(tl.int64) * stride)[:, None] + dims[None, :]
    if IS_FULL and SIZE == BLOCK:
        rows = tl.load(ptrs)
    elif IS_FULL:
        rows = tl.load(ptrs, mask=(dims < SIZE)[None, :], other=0.0)
    elif SIZE == BLOCK:
        rows = tl.load(ptrs, mask=is_key_N[:, None], other=0.0)
    else:
        rows = tl.load(ptrs, mask=is_key_N[:, None] & (dims < SIZE)[None, :], other=0.0)
    return rows


@triton.jit
def score(query_MD, keys_ND, scale, soft_cap, HAS_SOFT_CAP: tl.constexpr):
    """Times `scale`, or with a cap times `soft_cap`, these are logarithms to base 2."""
    scores_MN = tl.dot(query_MD, tl.trans(keys_ND), input_precision="ieee")
    if HAS_SOFT_CAP:
        # tanh(x) is 1 - 2 / (e^2x + 1)
        power_MN = tl.minimum(scores_MN * (scale * (2.0 * _LOG2_E) / soft_cap), _TANH_IS_ONE)
        scores_MN = 1.0 - 2.0 / (tl.exp2(power_MN) + 1.0)
    return scores_MN


@triton.jit
def fold(acc_MD, max_M, sums_MN, scores_MN, values_ND, factor):
    """Add keys to a running softmax; sums of its columns stay apart, so that none waits."""
    new_max_M = tl.maximum(max_M, tl.max(scores_MN, axis=1))
    # A row that has seen nothing yet: its differences would be those of two infinities.
    safe_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    kept_M1 = tl.exp2((max_M - safe_M) * factor)[:, None]
    below_M1 = (safe_M * -factor)[:, None]
    probs_MN = tl.exp2(tl.fma(scores_MN, factor, below_M1))
    sums_MN = tl.fma(sums_MN, kept_M1, probs_MN)
    acc_MD = acc_MD * kept_M1
    acc_MD = tl.dot(probs_MN.to(values_ND.dtype), values_ND, acc_MD, input_precision="ieee")
    return acc_MD, new_max_M, sums_MN


@triton.jit
def finish(
    acc_MD,
    max_M,
    sum_M,
    sinks_ptrs,
    out_ptr,
    place_M,
    is_row_M,
    factor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Store what a running softmax has come to; a sink is one more key, which has no value."""
    if HAS_SINKS:
        sinks_M = tl.load(sinks_ptrs, mask=is_row_M, other=0.0).to(tl.float32) * _LOG2_E
        new_max_M = tl.maximum(max_M * factor, sinks_M)
        kept_M = tl.exp2(tl.fma(max_M, factor, -new_max_M))
        acc_MD = acc_MD * kept_M[:, None]
        sum_M = tl.fma(sum_M, kept_M, tl.exp2(sinks_M - new_max_M))
    acc_MD = acc_MD / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    dims = tl.arange(0, BLOCK)
    out_ptrs = out_ptr + (place_M * SIZE)[:, None] + dims[None, :]
    is_out_MD = is_row_M[:, None] & (dims < SIZE)[None, :]
    tl.store(out_ptrs, acc_MD.to(out_ptr.dtype.element_ty), mask=is_out_MD)


@triton.jit
def read_span(
    acc_MD,
    max_M,
    sums_MN,
    total_MD,
    total_max_M,
    total_sum_M,
    border,
    segment,
    query_MD,
    slots_N,
    local_M,
    is_row_M,
    position_M,
    part_M,
    context,
    chain,
    origin,
    low,
    oldest,
    common,
    high,
    keys_ptr,
    values_ptr,
    table_ptr,
    positions_ptr,
    seen_ptr,
    parts_ptr,
    part_max_ptr,
    part_sum_ptr,
    scale,
    soft_cap,
    factor,
    window,
    width,
    key_stride,
    value_stride,
    seen_stride,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    SEGMENT: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_FRONTIER: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Keys from `low` to `high`, all of them seen and steps whole if it is full.

    `slots_N` are those of the first step. What a segment has come to goes to the parts, or to the
    total.
    """
    for begin in range(low, high, N):
        numbers_N = begin + tl.arange(0, N)
        is_key_N = is_read(numbers_N, oldest, high, HAS_WINDOW)
        # Blocks are looked up a step ahead, so that keys and values can be fetched ahead as well.
        next_slots_N = find_slots(table_ptr, begin + N, oldest, high, PAGE, N, HAS_WINDOW)
        keys_ND = load_rows(keys_ptr, slots_N, is_key_N, key_stride, KEY_SIZE, KEY_BLOCK, IS_FULL)
        scores_MN = score(query_MD, keys_ND, scale, soft_cap, HAS_SOFT_CAP)
        if not IS_FULL:  # noqa: SIM102 (known when the kernel is compiled)
            if HAS_WINDOW or begin + N > common:
                visible_MN = is_visible(
                    numbers_N, is_key_N, local_M, is_row_M, position_M, context, chain,
                    positions_ptr, seen_ptr, seen_stride, window, width,
                    HAS_SEEN, HAS_WINDOW, IS_FRONTIER,
                )  # fmt: skip
                scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))
        values_ND = load_rows(
            values_ptr, slots_N, is_key_N, value_stride, VALUE_SIZE, VALUE_BLOCK, IS_FULL
        )
        if begin == border:
            sum_M = sum_columns(sums_MN)
            if IS_SPLIT:
                leave(
                    acc_MD, max_M, sum_M, parts_ptr, part_max_ptr, part_sum_ptr, part_M + segment,
                    is_row_M, VALUE_SIZE, VALUE_BLOCK,
                )  # fmt: skip
            else:
                total_MD, total_max_M, total_sum_M = join(
                    total_MD, total_max_M, total_sum_M, acc_MD, max_M, sum_M, factor
                )
            acc_MD, sums_MN = tl.zeros_like(acc_MD), tl.zeros_like(sums_MN)
            max_M = tl.full(max_M.shape, float("-inf"), tl.float32)
            border = origin + segment_border(begin + 1 - origin, SEGMENT)[0]
            segment += 1
        acc_MD, max_M, sums_MN = fold(acc_MD, max_M, sums_MN, scores_MN, values_ND, factor)
        slots_N = next_slots_N
    return acc_MD, max_M, sums_MN, total_MD, total_max_M, total_sum_M, border, segment


@triton.jit
def read_tile(
    query_MD,
    slots_N,
    local_M,
    is_row_M,
    position_M,
    part_M,
    context,
    chain,
    origin,
    low,
    oldest,
    common,
    high,
    keys_ptr,
    values_ptr,
    table_ptr,
    positions_ptr,
    seen_ptr,
    parts_ptr,
    part_max_ptr,
    part_sum_ptr,
    scale,
    soft_cap,
    factor,
    window,
    width,
    key_stride,
    value_stride,
    seen_stride,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SEGMENT: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_FRONTIER: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_PARTED: tl.constexpr,
):
    """Keys from `low` to `high`: their total, or if it is split the last segment and which it is.

    Pointers are those of the tile.
    """
    acc_MD, max_M = tl.zeros([M, VALUE_BLOCK], tl.float32), tl.full([M], float("-inf"), tl.float32)
    sums_MN = tl.zeros([M, N], tl.float32)
    total_MD, total_max_M, total_sum_M = acc_MD, max_M, tl.zeros([M], tl.float32)
    border, segment = segment_border(low + 1 - origin, SEGMENT)
    border, segment = border + origin, segment - 1
    if IS_PARTED and not HAS_WINDOW:
        # A loop without masks has fewer instructions; two loops cost tiles with few keys time.
        full = low + tl.maximum(tl.minimum(common, high) - low, 0) // N * N
        acc_MD, max_M, sums_MN, total_MD, total_max_M, total_sum_M, border, segment = read_span(
            acc_MD, max_M, sums_MN, total_MD, total_max_M, total_sum_M, border, segment, query_MD,
            slots_N, local_M, is_row_M, position_M, part_M, context, chain, origin, low, oldest,
            common, full, keys_ptr, values_ptr, table_ptr, positions_ptr, seen_ptr, parts_ptr,
            part_max_ptr, part_sum_ptr, scale, soft_cap, factor, window, width, key_stride,
            value_stride, seen_stride, KEY_SIZE, VALUE_SIZE, KEY_BLOCK, VALUE_BLOCK, PAGE, N,
            SEGMENT, HAS_SEEN, HAS_WINDOW, HAS_SOFT_CAP, IS_FRONTIER, IS_SPLIT, True,
        )  # fmt: skip
        low, slots_N = full, find_slots(table_ptr, full, oldest, high, PAGE, N, HAS_WINDOW)
    acc_MD, max_M, sums_MN, total_MD, total_max_M, total_sum_M, border, segment = read_span(
        acc_MD, max_M, sums_MN, total_MD, total_max_M, total_sum_M, border, segment, query_MD,
        slots_N, local_M, is_row_M, position_M, part_M, context, chain, origin, low, oldest,
        common, high, keys_ptr, values_ptr, table_ptr, positions_ptr, seen_ptr, parts_ptr,
        part_max_ptr, part_sum_ptr, scale, soft_cap, factor, window, width, key_stride,
        value_stride, seen_stride, KEY_SIZE, VALUE_SIZE, KEY_BLOCK, VALUE_BLOCK, PAGE, N,
        SEGMENT, HAS_SEEN, HAS_WINDOW, HAS_SOFT_CAP, IS_FRONTIER, IS_SPLIT, False,
    )  # fmt: skip
    sum_M = sum_columns(sums_MN)
    if not IS_SPLIT:
        acc_MD, max_M, sum_M = join(
            total_MD, total_max_M, total_sum_M, acc_MD, max_M, sum_M, factor
        )
    return acc_MD, max_M, sum_M, segment
