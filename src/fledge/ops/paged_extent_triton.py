"""Which rows and keys a tile of paged attention has, and who sees whom.

The parts of `paged_attention_triton`.

Legend: M rows of a tile times query heads of its key head, N keys of a step.
"""

import triton
import triton.language as tl


@triton.jit
def locate(tile, starts_ptr, num_requests, ROWS: tl.constexpr, REQUESTS: tl.constexpr):
    """Request of a tile, and how many of that request's tiles come before it.

    Request b has its first tile at starts[b] // ROWS + b: there may be a tile too many, never one
    too few.
    """
    requests = tl.arange(0, REQUESTS)
    starts = tl.load(starts_ptr + requests, mask=requests < num_requests, other=0)
    starts = starts.to(tl.int32)
    is_begun = (requests < num_requests) & (starts // ROWS + requests <= tile)
    request = tl.sum(is_begun.to(tl.int32), axis=0) - 1
    return request, tile - (tl.load(starts_ptr + request).to(tl.int32) // ROWS + request)


@triton.jit
def lengths_of(
    request,
    starts_ptr,
    num_rows_ptr,
    chain_ptr,
    first_ptr,
    width,
    first_number,
    IS_FRONTIER: tl.constexpr,
):
    """First row of a request, how many rows it has, how many are its chain, and its oldest key."""
    if IS_FRONTIER:
        start, num_rows, chain, first = request * width, width, 0, first_number
    else:
        start = tl.load(starts_ptr + request).to(tl.int32)
        num_rows = tl.load(num_rows_ptr + request).to(tl.int32)
        chain = tl.load(chain_ptr + request).to(tl.int32)
        first = tl.load(first_ptr + request).to(tl.int32)
    return start, num_rows, chain, first


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
    ROWS: tl.constexpr,
    N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_FRONTIER: tl.constexpr,
):
    """Numbers of a tile, from `low` to `end`; up to `common` every row of it sees them all.

    Those below `oldest` are not read. Steps and segments count from `origin` on, whatever rows a
    tile has.
    """
    if IS_FRONTIER:
        newest, end, common = context + level - 1, context + width * level, context
    else:
        # A node's ancestors come before it, and no draft is older than its root.
        newest = context + tl.minimum(first_row, chain - 1)
        end = context + tl.minimum(first_row + ROWS, num_rows)
        common = newest + 1
    origin, oldest, low = first, first, first
    if HAS_WINDOW:
        oldest = tl.maximum(first, newest - window + 1)
        origin, low = first * 0, oldest // N * N
    return origin, low, oldest, common, end


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
