"""Adding to the residual stream and norming it in one launch, a program for each row.

Legend: T tokens, D width.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.launch_chain_triton import chained, wait_for_inputs
from fledge.ops.paged_shape import power_of_two

if TYPE_CHECKING:
    from fledge.ops.norms import Norm

NORM_KINDS: dict[str | None, int] = {None: 0, "cast_first": 1, "cast_last": 2, "one_plus": 3}


@triton.jit
def scale_normed(normed, weights, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """What a family makes of normed values; float32 in and out."""
    if KIND == 1:
        normed = normed.to(DTYPE).to(tl.float32) * weights
    elif KIND == 2:
        normed = weights * normed
    else:
        normed = normed * (1.0 + weights)
    return normed.to(DTYPE).to(tl.float32)


@triton.jit
def norm_block(values, weights, eps, size, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Norm along the last dimension, as a family does it; float32 in and out."""
    mean = tl.sum(values * values, axis=-1, keep_dims=True) / size
    return scale_normed(values * tl.rsqrt(mean + eps), weights, KIND, DTYPE)


@triton.jit
def _norm_kernel(
    fresh_ptr,
    stream_ptr,
    after_ptr,
    before_ptr,
    summed_ptr,
    normed_ptr,
    fresh_stride_t,
    after_eps,
    before_eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_STREAM: tl.constexpr,
    AFTER: tl.constexpr,
    BEFORE: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    if IS_CHAINED:
        wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_there = columns < SIZE
    dtype = summed_ptr.dtype.element_ty
    # All that is read is asked for before anything of it is used.
    fresh = tl.load(fresh_ptr + row * fresh_stride_t + columns, mask=is_there, other=0.0)
    if HAS_STREAM:
        stream = tl.load(stream_ptr + row * SIZE + columns, mask=is_there, other=0.0)
    if AFTER > 0:
        after = tl.load(after_ptr + columns, mask=is_there, other=0.0)
    if BEFORE > 0:
        before = tl.load(before_ptr + columns, mask=is_there, other=0.0)
    values = fresh.to(tl.float32)
    if AFTER > 0:
        values = norm_block(values, after.to(tl.float32), after_eps, SIZE, AFTER, dtype)
    if HAS_STREAM:
        values = (stream.to(tl.float32) + values).to(dtype).to(tl.float32)
    if HAS_STREAM or AFTER > 0:
        tl.store(summed_ptr + row * SIZE + columns, values.to(dtype), mask=is_there)
    if BEFORE > 0:
        values = norm_block(values, before.to(tl.float32), before_eps, SIZE, BEFORE, dtype)
        tl.store(normed_ptr + row * SIZE + columns, values.to(dtype), mask=is_there)


def add_and_norm(
    fresh_TD: Tensor, stream_TD: Tensor | None, after: "Norm | None", before: "Norm | None"
) -> tuple[Tensor, Tensor]:
    """The twin is `residual_norm` by plain operations."""
    num_rows, size = fresh_TD.shape
    is_new = stream_TD is not None or after is not None
    summed_TD = fresh_TD.new_empty(num_rows, size) if is_new else fresh_TD
    normed_TD = summed_TD if before is None else fresh_TD.new_empty(num_rows, size)
    if num_rows == 0:
        return summed_TD, normed_TD
    stream = fresh_TD if stream_TD is None else stream_TD.contiguous()
    _norm_kernel[(num_rows,)](
        fresh_TD,
        stream,
        fresh_TD if after is None else after.weight_D,
        fresh_TD if before is None else before.weight_D,
        summed_TD,
        normed_TD,
        fresh_TD.stride(0),
        0.0 if after is None else after.eps,
        0.0 if before is None else before.eps,
        SIZE=size,
        BLOCK=power_of_two(size),
        HAS_STREAM=stream_TD is not None,
        AFTER=NORM_KINDS[None if after is None else after.kind],
        BEFORE=NORM_KINDS[None if before is None else before.kind],
        **chained(fresh_TD.device),
        num_warps=num_warps_for(size, fresh_TD.dtype),
    )
    return summed_TD, normed_TD


def num_warps_for(size: int, dtype: torch.dtype) -> int:
    """Warps of a program that holds a row of this size."""
    return min(16, max(1, power_of_two(size) * dtype.itemsize // 1024))
