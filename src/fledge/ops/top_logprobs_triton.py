"""The kernels of `top_logprobs`: parts of the vocabulary first, then the parts of a row together.

Nothing as wide as the vocabulary is written. Among equals the first column wins.

Legend: T rows, P parts of the vocabulary, C columns of a part, K best.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.paged_shape import power_of_two

_PART = 4096
_LOWEST = tl.constexpr(-3.0e38)
"""Below every logit, above what was taken already."""


@triton.jit
def _take_best(values_C, columns_C):
    """The largest value, its column, and what is left."""
    best = tl.max(values_C, axis=0)
    column = tl.min(tl.where(values_C == best, columns_C, 2147483647), axis=0)
    return best, column, tl.where(columns_C == column, float("-inf"), values_C)


@triton.jit(do_not_specialize=["num_best"])
def _part_kernel(
    logits_ptr,
    values_ptr,
    columns_ptr,
    max_ptr,
    sum_ptr,
    vocab_size,
    logits_stride,
    num_best,
    PART: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns_C = part * PART + tl.arange(0, PART)
    is_there_C = columns_C < vocab_size
    ptrs = logits_ptr + row * logits_stride + columns_C
    logits_C = tl.load(ptrs, mask=is_there_C, other=float("-inf")).to(tl.float32)
    is_number_C = logits_C == logits_C
    values_C = tl.where(is_number_C, tl.maximum(logits_C, _LOWEST), _LOWEST)
    values_C = tl.where(is_there_C, values_C, float("-inf"))
    largest = tl.max(values_C, axis=0)
    total = tl.sum(tl.where(is_there_C, tl.exp(logits_C - largest), 0.0), axis=0)
    place = row * tl.num_programs(1) + part
    tl.store(max_ptr + place, largest)
    tl.store(sum_ptr + place, total)
    for rank in range(num_best):
        best, column, values_C = _take_best(values_C, columns_C)
        tl.store(values_ptr + place * num_best + rank, best)
        tl.store(columns_ptr + place * num_best + rank, column)


@triton.jit(do_not_specialize=["num_parts", "num_best"])
def _row_kernel(
    values_ptr,
    columns_ptr,
    max_ptr,
    sum_ptr,
    logprobs_ptr,
    indices_ptr,
    num_parts,
    num_best,
    PARTS: tl.constexpr,
    FOUND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts_P, found_F = tl.arange(0, PARTS), tl.arange(0, FOUND)
    is_part_P = parts_P < num_parts
    max_P = tl.load(max_ptr + row * num_parts + parts_P, mask=is_part_P, other=float("-inf"))
    sum_P = tl.load(sum_ptr + row * num_parts + parts_P, mask=is_part_P, other=0.0)
    largest = tl.max(max_P, axis=0)
    log_total = largest + tl.log(tl.sum(sum_P * tl.exp(max_P - largest), axis=0))
    num_found = num_parts * num_best
    is_found_F = found_F < num_found
    first = row * num_found
    values_F = tl.load(values_ptr + first + found_F, mask=is_found_F, other=float("-inf"))
    columns_F = tl.load(columns_ptr + first + found_F, mask=is_found_F, other=2147483647)
    for rank in range(num_best):
        best, column, values_F = _take_best(values_F, columns_F)
        tl.store(logprobs_ptr + row * num_best + rank, best - log_total)
        tl.store(indices_ptr + row * num_best + rank, column)


def top_columns(logits_TV: Tensor, num_best: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities [T, K] in falling order, float32, and their columns."""
    num_rows, vocab_size = logits_TV.shape
    if logits_TV.stride(1) != 1:
        logits_TV = logits_TV.contiguous()
    num_parts = triton.cdiv(vocab_size, _PART)
    found = (num_rows, num_parts, num_best)
    values = logits_TV.new_empty(found, dtype=torch.float32)
    columns = logits_TV.new_empty(found, dtype=torch.int32)
    maxima, sums = logits_TV.new_empty(2, num_rows, num_parts, dtype=torch.float32)
    _part_kernel[(num_rows, num_parts)](
        logits_TV,
        values,
        columns,
        maxima,
        sums,
        vocab_size,
        logits_TV.stride(0),
        num_best,
        PART=_PART,
    )
    logprobs_TK = logits_TV.new_empty(num_rows, num_best, dtype=torch.float32)
    indices_TK = logits_TV.new_empty(num_rows, num_best, dtype=torch.long)
    _row_kernel[(num_rows,)](
        values,
        columns,
        maxima,
        sums,
        logprobs_TK,
        indices_TK,
        num_parts,
        num_best,
        PARTS=max(16, power_of_two(num_parts)),
        FOUND=max(16, power_of_two(num_parts * num_best)),
    )
    return logprobs_TK, indices_TK
