"""Keys of one tile split over several programs: what each leaves, and how the last joins it.

    program   split 0        split 1        split 2
              part, count 1  part, count 3  part, count 2
                             joins 0, 1, 2; count 0 again

The order in which parts are joined is that of the keys, whoever is last.

Legend: M rows of a tile times query heads of its key head, D head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.paged_tile_triton import finish

MOST_COUNTS = 16_384
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
    places_M,
    is_row_M,
    num_live,
    M: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`places_M` are those of split 0. Other processors wrote the parts: L1 does not have them."""
    AT_ONCE: tl.constexpr = 4 if M * BLOCK <= 2048 else 2 if M * BLOCK <= 4096 else 1
    dims = tl.arange(0, BLOCK)
    is_part_MD = is_row_M[:, None] & (dims < SIZE)[None, :]
    max_M, sum_M = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc_MD = tl.zeros([M, BLOCK], tl.float32)
    for split in tl.range(0, num_live, loop_unroll_factor=AT_ONCE):
        at_M = places_M + split
        part_max_M = tl.load(
            max_ptr + at_M, mask=is_row_M, other=float("-inf"), cache_modifier=".cg"
        )
        part_sum_M = tl.load(sum_ptr + at_M, mask=is_row_M, other=0.0, cache_modifier=".cg")
        part_ptrs = parts_ptr + (at_M * SIZE)[:, None] + dims[None, :]
        part_MD = tl.load(part_ptrs, mask=is_part_MD, other=0.0, cache_modifier=".cg")
        new_max_M = tl.maximum(max_M, part_max_M)
        safe_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        kept_M, weight_M = tl.exp2(max_M - safe_M), tl.exp2(part_max_M - safe_M)
        acc_MD = acc_MD * kept_M[:, None] + part_MD * weight_M[:, None]
        sum_M = sum_M * kept_M + part_sum_M * weight_M
        max_M = new_max_M
    return acc_MD, max_M, sum_M


@triton.jit
def leave_or_join(
    acc_MD,
    max_M,
    sum_M,
    sinks_ptrs,
    out_ptr,
    parts_ptr,
    max_ptr,
    sum_ptr,
    count_ptr,
    place_M,
    is_row_M,
    split,
    num_live,
    num_splits,
    M: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Leave the part of one split; if all others have left theirs, store what they come to."""
    dims, places_M = tl.arange(0, BLOCK), place_M * num_splits
    tl.store(max_ptr + places_M + split, max_M, mask=is_row_M)
    tl.store(sum_ptr + places_M + split, sum_M, mask=is_row_M)
    part_ptrs = parts_ptr + ((places_M + split) * SIZE)[:, None] + dims[None, :]
    tl.store(part_ptrs, acc_MD, mask=is_row_M[:, None] & (dims < SIZE)[None, :])
    if is_last(count_ptr, num_live):
        whole_MD, whole_max_M, whole_sum_M = join_parts(
            parts_ptr, max_ptr, sum_ptr, places_M, is_row_M, num_live, M, SIZE, BLOCK
        )
        finish(
            whole_MD, whole_max_M, whole_sum_M, sinks_ptrs, out_ptr, place_M, is_row_M,
            SIZE, BLOCK, HAS_SINKS,
        )  # fmt: skip
