"""One tile of paged attention: a running softmax over its keys.

The parts of `paged_attention_triton`. Scores are logarithms to base 2.

Legend: M rows of a tile times query heads of its key head, N keys of a step, D head size.
"""

import triton
import triton.language as tl

from fledge.ops.paged_extent_triton import is_visible

_TANH_IS_ONE = tl.constexpr(60.0)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_slots(table_ptr, begin, high, PAGE: tl.constexpr, N: tl.constexpr):
    """Slots of the numbers from `begin` on that are below `high`."""
    numbers_N = begin + tl.arange(0, N)
    blocks_N = tl.load(table_ptr + numbers_N // PAGE, mask=numbers_N < high, other=0)
    return blocks_N.to(tl.int64) * PAGE + numbers_N % PAGE


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
    ptrs = pool_ptr + (slots_N * stride)[:, None] + dims[None, :]
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
    """`scale` and `soft_cap` are for logarithms to base 2."""
    scores_MN = tl.dot(query_MD, tl.trans(keys_ND), input_precision="ieee") * scale
    if HAS_SOFT_CAP:
        # tanh(x) is 1 - 2 / (e^2x + 1)
        power_MN = tl.minimum(scores_MN * (2.0 * _LOG2_E / soft_cap), _TANH_IS_ONE)
        scores_MN = soft_cap * (1.0 - 2.0 / (tl.exp2(power_MN) + 1.0))
    return scores_MN


@triton.jit
def fold(acc_MD, max_M, sums, scores_MN, values_ND, SUMS_COLUMNS: tl.constexpr):
    """Add keys to a running softmax; sums are those of rows, or of their columns still apart."""
    new_max_M = tl.maximum(max_M, tl.max(scores_MN, axis=1))
    # A row that has seen nothing yet: its differences would be those of two infinities.
    safe_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    kept_M = tl.exp2(max_M - safe_M)
    probs_MN = tl.exp2(scores_MN - safe_M[:, None])
    if SUMS_COLUMNS:
        sums = sums * kept_M[:, None] + probs_MN
    else:
        sums = sums * kept_M + tl.sum(probs_MN, axis=1)
    acc_MD = acc_MD * kept_M[:, None]
    acc_MD = tl.dot(probs_MN.to(values_ND.dtype), values_ND, acc_MD, input_precision="ieee")
    return acc_MD, new_max_M, sums


@triton.jit
def finish(
    acc_MD,
    max_M,
    sum_M,
    sinks_ptrs,
    out_ptr,
    place_M,
    is_row_M,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Store what a running softmax has come to; a sink is one more key, which has no value."""
    if HAS_SINKS:
        sinks_M = tl.load(sinks_ptrs, mask=is_row_M, other=0.0).to(tl.float32) * _LOG2_E
        new_max_M = tl.maximum(max_M, sinks_M)
        kept_M = tl.exp2(max_M - new_max_M)
        acc_MD, sum_M = acc_MD * kept_M[:, None], sum_M * kept_M + tl.exp2(sinks_M - new_max_M)
    acc_MD = acc_MD / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    dims = tl.arange(0, BLOCK)
    out_ptrs = out_ptr + (place_M * SIZE)[:, None] + dims[None, :]
    is_out_MD = is_row_M[:, None] & (dims < SIZE)[None, :]
    tl.store(out_ptrs, acc_MD.to(out_ptr.dtype.element_ty), mask=is_out_MD)


@triton.jit
def read_span(
    acc_MD,
    max_M,
    sums,
    query_MD,
    slots_N,
    local_M,
    is_row_M,
    position_M,
    context,
    chain,
    low,
    common,
    high,
    keys_ptr,
    values_ptr,
    table_ptr,
    positions_ptr,
    seen_ptr,
    scale,
    soft_cap,
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
    HAS_SEEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_FRONTIER: tl.constexpr,
    SUMS_COLUMNS: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Keys from `low` to `high`, all of them seen and steps whole if it is full.

    `slots_N` are those of the first step.
    """
    for begin in range(low, high, N):
        numbers_N = begin + tl.arange(0, N)
        is_key_N = numbers_N < high
        # Blocks are looked up a step ahead, so that keys and values can be fetched ahead as well.
        next_slots_N = find_slots(table_ptr, begin + N, high, PAGE, N)
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
        acc_MD, max_M, sums = fold(acc_MD, max_M, sums, scores_MN, values_ND, SUMS_COLUMNS)
        slots_N = next_slots_N
    return acc_MD, max_M, sums


@triton.jit
def read_tile(
    query_MD,
    slots_N,
    local_M,
    is_row_M,
    position_M,
    context,
    chain,
    low,
    common,
    high,
    keys_ptr,
    values_ptr,
    table_ptr,
    positions_ptr,
    seen_ptr,
    scale,
    soft_cap,
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
    HAS_SEEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_FRONTIER: tl.constexpr,
):
    """Keys from `low` to `high`; pointers are those of the tile."""
    # Warps of a small tile share its rows: a sum in each step would make them wait for each other.
    SUMS_COLUMNS: tl.constexpr = M < 64
    acc_MD, max_M = tl.zeros([M, VALUE_BLOCK], tl.float32), tl.full([M], float("-inf"), tl.float32)
    if SUMS_COLUMNS:
        sums = tl.zeros([M, N], tl.float32)
    else:
        sums = tl.zeros([M], tl.float32)
        if not HAS_WINDOW:
            # A loop without masks is faster, and one after another only costs small tiles time.
            full = low + tl.maximum(tl.minimum(common, high) - low, 0) // N * N
            acc_MD, max_M, sums = read_span(
                acc_MD, max_M, sums, query_MD, slots_N, local_M, is_row_M, position_M, context,
                chain, low, common, full, keys_ptr, values_ptr, table_ptr, positions_ptr, seen_ptr,
                scale, soft_cap, window, width, key_stride, value_stride, seen_stride,
                KEY_SIZE, VALUE_SIZE, KEY_BLOCK, VALUE_BLOCK, PAGE, N, HAS_SEEN, HAS_WINDOW,
                HAS_SOFT_CAP, IS_FRONTIER, SUMS_COLUMNS, True,
            )  # fmt: skip
            low, slots_N = full, find_slots(table_ptr, full, high, PAGE, N)
    acc_MD, max_M, sums = read_span(
        acc_MD, max_M, sums, query_MD, slots_N, local_M, is_row_M, position_M, context, chain,
        low, common, high, keys_ptr, values_ptr, table_ptr, positions_ptr, seen_ptr,
        scale, soft_cap, window, width, key_stride, value_stride, seen_stride,
        KEY_SIZE, VALUE_SIZE, KEY_BLOCK, VALUE_BLOCK, PAGE, N, HAS_SEEN, HAS_WINDOW,
        HAS_SOFT_CAP, IS_FRONTIER, SUMS_COLUMNS, False,
    )  # fmt: skip
    return acc_MD, max_M, tl.sum(sums, axis=1) if SUMS_COLUMNS else sums
