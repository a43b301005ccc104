"""One tile of paged attention: which rows and keys it has, and a running softmax over them.

The parts of `paged_attention_triton`. Scores are logarithms to base 2.

Legend: M rows of a tile times query heads of its key head, N keys of a step, D head size.
"""

import triton
import triton.language as tl

_TANH_IS_ONE = tl.constexpr(60.0)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def locate(tile, starts_ptr, num_requests, ROWS: tl.constexpr, REQUESTS: tl.constexpr):
    """Request of a tile, and how many of that request's tiles come before it.

    Request b has its first tile at starts[b] // ROWS + b: there may be a tile too many, never one
    too few.
    """
    requests = tl.arange(0, REQUESTS)
    starts = tl.load(starts_ptr + requests, mask=requests < num_requests, other=0)
    is_begun = (requests < num_requests) & (starts // ROWS + requests <= tile)
    request = tl.sum(is_begun.to(tl.int32), axis=0) - 1
    return request, tile - (tl.load(starts_ptr + request) // ROWS + request)


@triton.jit
def extent(
    first_row,
    num_rows,
    chain,
    context,
    first,
    window,
    width,
    level,
    split,
    num_splits,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    FEWEST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_FULL: tl.constexpr,
    IS_FRONTIER: tl.constexpr,
):
    """Numbers this program reads: from `low`, up to `full` seen by all its rows, then to `high`."""
    if IS_FRONTIER:
        oldest, end, seen_by_all = context + level - 1, context + width * level, context
    else:
        # A node's ancestors come before it, and no draft is older than its root.
        oldest = context + tl.minimum(first_row, chain - 1)
        end = context + tl.minimum(first_row + ROWS, num_rows)
        seen_by_all = oldest + 1
    low = first
    if HAS_WINDOW:
        low = tl.maximum(low, oldest - window + 1)
    steps = tl.cdiv(tl.cdiv(end - low, N), num_splits)
    each = tl.maximum(steps, FEWEST // N) * N
    low = low + split * each
    high = tl.minimum(end, low + each)
    full = low
    if HAS_FULL:
        full += tl.maximum(tl.minimum(seen_by_all, high) - low, 0) // N * N
    return low, full, high


@triton.jit
def is_visible(
    numbers_N,
    is_key_N,
    local_M,
    is_row_M,
    position_M,
    context,
    chain,
    positions_ptr,
    seen_ptr,
    seen_stride,
    window,
    width,
    HAS_SEEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_FRONTIER: tl.constexpr,
):
    """Which keys each row sees, [M, N]; `positions_ptr` and `seen_ptr` are those of the request."""
    last_M = context + tl.minimum(local_M, chain - 1)
    visible = (numbers_N[None, :] <= last_M[:, None]) & is_key_N[None, :]
    if HAS_SEEN:
        # The root ends the chain and is node 0; a frontier has no chain, and counts from 0.
        shift: tl.constexpr = 0 if IS_FRONTIER else 1
        row_M = local_M - chain + shift
        key_N = numbers_N - context - chain + shift
        is_pair = (is_row_M & (row_M >= shift))[:, None] & (is_key_N & (key_N >= shift))[None, :]
        seen_ptrs = seen_ptr + row_M[:, None] * seen_stride + key_N[None, :]
        visible = visible | (tl.load(seen_ptrs, mask=is_pair, other=0) != 0)
    if HAS_WINDOW:
        new_N = numbers_N - context
        if IS_FRONTIER:
            new_position_N = context + new_N // width
        else:
            is_new_N = is_key_N & (new_N >= 0)
            new_position_N = tl.load(positions_ptr + new_N, mask=is_new_N, other=0)
        position_N = tl.where(new_N < 0, numbers_N, new_position_N)
        visible = visible & (position_M[:, None] - position_N[None, :] < window)
    return visible


@triton.jit
def find_slots(table_ptr, numbers_N, is_key_N, PAGE: tl.constexpr):
    blocks_N = tl.load(table_ptr + numbers_N // PAGE, mask=is_key_N, other=0)
    return blocks_N.to(tl.int64) * PAGE + numbers_N % PAGE


@triton.jit
def load_rows(
    pool_ptr,
    slots_N,
    is_key_N,
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Rows of some slots, [N, BLOCK]; what is masked is 0, never what happens to lie there."""
    dims = tl.arange(0, BLOCK)
    ptrs = pool_ptr + slots_N[:, None] * stride + dims[None, :]
    if IS_MASKED:
        rows = tl.load(ptrs, mask=is_key_N[:, None] & (dims < SIZE)[None, :], other=0.0)
    elif SIZE == BLOCK:
        rows = tl.load(ptrs)
    else:
        rows = tl.load(ptrs, mask=(dims < SIZE)[None, :], other=0.0)
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
def fold(acc_MD, max_M, sum_M, scores_MN, values_ND):
    """Add keys to a running softmax."""
    new_max_M = tl.maximum(max_M, tl.max(scores_MN, axis=1))
    # A row that has seen nothing yet: its differences would be those of two infinities.
    safe_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    kept_M = tl.exp2(max_M - safe_M)
    probs_MN = tl.exp2(scores_MN - safe_M[:, None])
    sum_M = sum_M * kept_M + tl.sum(probs_MN, axis=1)
    acc_MD = acc_MD * kept_M[:, None]
    acc_MD = tl.dot(probs_MN.to(values_ND.dtype), values_ND, acc_MD, input_precision="ieee")
    return acc_MD, new_max_M, sum_M


@triton.jit
def read_tile(
    query_MD,
    max_M,
    sum_M,
    local_M,
    is_row_M,
    position_M,
    context,
    chain,
    low,
    full,
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
    HAS_FULL: tl.constexpr,
    IS_FRONTIER: tl.constexpr,
):
    """Keys that all rows see, without a mask, then the others; pointers are those of the tile."""
    acc_MD, keys_N = tl.zeros([M, VALUE_BLOCK], tl.float32), tl.arange(0, N)
    if HAS_FULL:
        # Blocks are looked up a step ahead, so that keys and values can be fetched ahead as well.
        slots_N = find_slots(table_ptr, low + keys_N, low + keys_N < full, PAGE)
        for begin in range(low, full, N):
            next_N = begin + N + keys_N
            next_slots_N = find_slots(table_ptr, next_N, next_N < full, PAGE)
            keys_ND = load_rows(keys_ptr, slots_N, None, key_stride, KEY_SIZE, KEY_BLOCK, False)
            scores_MN = score(query_MD, keys_ND, scale, soft_cap, HAS_SOFT_CAP)
            values_ND = load_rows(
                values_ptr, slots_N, None, value_stride, VALUE_SIZE, VALUE_BLOCK, False
            )
            acc_MD, max_M, sum_M = fold(acc_MD, max_M, sum_M, scores_MN, values_ND)
            slots_N = next_slots_N
    slots_N = find_slots(table_ptr, full + keys_N, full + keys_N < high, PAGE)
    for begin in range(full, high, N):
        numbers_N = begin + keys_N
        is_key_N, is_next_N = numbers_N < high, numbers_N + N < high
        next_slots_N = find_slots(table_ptr, numbers_N + N, is_next_N, PAGE)
        keys_ND = load_rows(keys_ptr, slots_N, is_key_N, key_stride, KEY_SIZE, KEY_BLOCK, True)
        scores_MN = score(query_MD, keys_ND, scale, soft_cap, HAS_SOFT_CAP)
        visible_MN = is_visible(
            numbers_N, is_key_N, local_M, is_row_M, position_M, context, chain, positions_ptr,
            seen_ptr, seen_stride, window, width, HAS_SEEN, HAS_WINDOW, IS_FRONTIER,
        )  # fmt: skip
        scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))
        values_ND = load_rows(
            values_ptr, slots_N, is_key_N, value_stride, VALUE_SIZE, VALUE_BLOCK, True
        )
        acc_MD, max_M, sum_M = fold(acc_MD, max_M, sum_M, scores_MN, values_ND)
        slots_N = next_slots_N
    return acc_MD, max_M, sum_M
