"""Keys of a request in segments: what a tile makes of each, and how those come together.

Sums are rounded, so that their order decides the last bits. It is the same for a row in any
company: segments begin at fixed numbers, whoever reads them; each is summed by itself, and they are
joined from the oldest to the newest. Whether one program reads all or some each changes nothing.

    numbers   0        256       512       768      ...   16384       16896
    segments  [   0    )[   1    )[   2    )[  ...         [   64      )[ ...   twice as long there

    program   split 0        split 1        split 2
              part, count 1  part, count 3  part, count 2
                             joins 0, 1, 2; count 0 again

Behind long contexts parts are many, and a kernel of its own joins them (`paged_join_triton`):
several programs for each tile.

Segments are longer further on, so that parts stay few. To multiply and add is always written as one
operation: the compiler would make it one here and two there.

Legend: M rows of a tile times query heads of its key head, N keys of a step, D head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.paged_shape import SEGMENTS_OF_A_LENGTH

MOST_COUNTS = 16_384
_SEGMENTS_OF_A_LENGTH = tl.constexpr(SEGMENTS_OF_A_LENGTH)
_ONE = tl.constexpr(2.0**40)
"""Probabilities as whole numbers, which add up to the same in any order."""

_counts: dict[tuple[torch.device, int], Tensor] = {}


def counts_for(device: torch.device) -> Tensor:
    """Zeros, which every launch leaves as it found them: one after another on a stream use them."""
    if device.type != "cuda":
        return torch.zeros(MOST_COUNTS, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counts:
        made = torch.zeros(MOST_COUNTS, dtype=torch.int32, device=device)
        if torch.cuda.is_current_stream_capturing():
            # Not zero before the graph runs, and the graph's own.
            return made
        _counts[key] = made
    return _counts[key]


@triton.jit
def segment_border(number, SEGMENT: tl.constexpr):
    """The first number not below this one that begins a segment, and which segment that is."""
    LIMIT: tl.constexpr = _SEGMENTS_OF_A_LENGTH * SEGMENT
    # How many bits the quotient has, from the exponent of a float.
    limits = (tl.maximum(number - 1, 0) // LIMIT).to(tl.float32)
    doubled = tl.maximum((limits.to(tl.int32, bitcast=True) >> 23) - 126, 0)
    is_short, size = doubled == 0, SEGMENT << doubled
    start = tl.where(is_short, 0, (LIMIT << doubled) // 2)
    before = tl.where(is_short, 0, (doubled + 1) * (_SEGMENTS_OF_A_LENGTH // 2))
    index = tl.cdiv(number - start, size)
    return start + index * size, before + index


@triton.jit
def segment_start(number, SEGMENT: tl.constexpr):
    """The last number not above this one that begins a segment."""
    LIMIT: tl.constexpr = _SEGMENTS_OF_A_LENGTH * SEGMENT
    limits = (number // LIMIT).to(tl.float32)
    doubled = tl.maximum((limits.to(tl.int32, bitcast=True) >> 23) - 126, 0)
    # Where segments of a length begin is a multiple of that length.
    size = SEGMENT << doubled
    return number // size * size


@triton.jit
def split_range(low, end, origin, split, num_splits, SEGMENT: tl.constexpr, IS_SPLIT: tl.constexpr):
    """Numbers of one of the programs that share a tile, and how many of them take part."""
    begin, stop, num_live = low, end, 1
    if IS_SPLIT:
        each = tl.maximum(tl.cdiv(end - low, num_splits), SEGMENT)
        border = origin + segment_start(low + split * each - origin, SEGMENT)
        next_border = origin + segment_start(low + (split + 1) * each - origin, SEGMENT)
        num_live = tl.cdiv(end - low, each)
        # A tile within one segment is the first program's: nobody would wait for the others.
        first_border, _ = segment_border(low + 1 - origin, SEGMENT)
        num_live = tl.where(origin + first_border >= end, 1, num_live)
        # A tile may begin within a segment: nobody reads what is before it.
        begin = tl.maximum(border, low)
        stop = tl.where(split == num_live - 1, end, tl.maximum(next_border, low))
    return begin, stop, num_live


@triton.jit
def sum_columns(sums_MN):
    """Row by row, in any order: whole numbers."""
    return tl.sum((sums_MN * _ONE).to(tl.int64), axis=1).to(tl.float32) * (1.0 / _ONE)


@triton.jit
def join(acc_MD, max_M, sum_M, part_MD, part_max_M, part_sum_M, factor):
    """Add a segment to those before it; one that a row sees nothing of leaves it as it is."""
    new_max_M = tl.maximum(max_M, part_max_M)
    safe_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    kept_M = tl.exp2((max_M - safe_M) * factor)
    weight_M = tl.exp2((part_max_M - safe_M) * factor)
    acc_MD = tl.fma(acc_MD, kept_M[:, None], part_MD * weight_M[:, None])
    return acc_MD, new_max_M, tl.fma(sum_M, kept_M, part_sum_M * weight_M)


@triton.jit
def leave(
    acc_MD,
    max_M,
    sum_M,
    parts_ptr,
    max_ptr,
    sum_ptr,
    part_M,
    is_row_M,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store what a segment has come to; `part_M` is its place for each row."""
    dims = tl.arange(0, BLOCK)
    tl.store(max_ptr + part_M, max_M, mask=is_row_M)
    tl.store(sum_ptr + part_M, sum_M, mask=is_row_M)
    part_ptrs = parts_ptr + (part_M * SIZE)[:, None] + dims[None, :]
    tl.store(part_ptrs, acc_MD, mask=is_row_M[:, None] & (dims < SIZE)[None, :])


@triton.jit
def is_last(count_ptr, num_live):
    """Whether the others of a tile have left their parts; then the count is 0 again."""
    # What all threads stored comes before the count.
    tl.debug_barrier()
    before = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    if before == num_live - 1:
        tl.store(count_ptr, 0)
    return before == num_live - 1


@triton.jit
def join_parts(
    parts_ptr,
    max_ptr,
    sum_ptr,
    part_M,
    is_row_M,
    begin,
    end,
    factor,
    M: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Segments from `begin` to `end`; other processors wrote them: L1 does not have them."""
    AT_ONCE: tl.constexpr = 4 if M * BLOCK <= 2048 else 2 if M * BLOCK <= 4096 else 1
    dims = tl.arange(0, BLOCK)
    is_part_MD = is_row_M[:, None] & (dims < SIZE)[None, :]
    max_M, sum_M = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc_MD = tl.zeros([M, BLOCK], tl.float32)
    for segment in tl.range(begin, end, loop_unroll_factor=AT_ONCE):
        at_M = part_M + segment
        part_max_M = tl.load(
            max_ptr + at_M, mask=is_row_M, other=float("-inf"), cache_modifier=".cg"
        )
        part_sum_M = tl.load(sum_ptr + at_M, mask=is_row_M, other=0.0, cache_modifier=".cg")
        part_ptrs = parts_ptr + (at_M * SIZE)[:, None] + dims[None, :]
        part_MD = tl.load(part_ptrs, mask=is_part_MD, other=0.0, cache_modifier=".cg")
        acc_MD, max_M, sum_M = join(acc_MD, max_M, sum_M, part_MD, part_max_M, part_sum_M, factor)
    return acc_MD, max_M, sum_M


@triton.jit
def leave_or_join(
    acc_MD,
    max_M,
    sum_M,
    parts_ptr,
    max_ptr,
    sum_ptr,
    count_ptr,
    part_M,
    is_row_M,
    segment,
    has_keys,
    low,
    end,
    num_live,
    factor,
    M: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
    JOINS: tl.constexpr,
):
    """What all keys of a tile come to and True, for the program that is last; else leave a part.

    A tile within one segment has nobody to wait for. Where nobody `JOINS`, all leave their parts.
    """
    border, after_first = segment_border(low + 1, SEGMENT)
    is_whole = border >= end
    if not is_whole:
        if has_keys:
            leave(
                acc_MD, max_M, sum_M, parts_ptr, max_ptr, sum_ptr, part_M + segment, is_row_M,
                SIZE, BLOCK,
            )  # fmt: skip
        if JOINS:
            is_whole = is_last(count_ptr, num_live)
            if is_whole:
                _, after_last = segment_border(end, SEGMENT)
                acc_MD, max_M, sum_M = join_parts(
                    parts_ptr, max_ptr, sum_ptr, part_M, is_row_M, after_first - 1, after_last,
                    factor, M, SIZE, BLOCK,
                )  # fmt: skip
    return acc_MD, max_M, sum_M, is_whole
