"""Norming, rotating and storing what a layer projects, in one launch: a program for each head.

Legend: T tokens, H query heads, G key heads, D head size.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.norms_triton import NORM_KINDS
from fledge.ops.paged_shape import power_of_two

if TYPE_CHECKING:
    from fledge.ops.rope_write import HeadLayout, Rotation


@triton.jit
def _rotate_kernel(
    product_ptr,
    rotation_ptr,
    norm_ptr,
    query_ptr,
    key_pool_ptr,
    value_pool_ptr,
    slots_ptr,
    product_stride_t,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    is_there = dims < HALF
    dtype = query_ptr.dtype.element_ty
    from_ptr = product_ptr + row * product_stride_t + head * SIZE
    # One type in both branches below; widening and narrowing again changes nothing.
    first = tl.load(from_ptr + dims, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(from_ptr + HALF + dims, mask=is_there, other=0.0).to(tl.float32)
    slot = row
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + row)
    is_stored = dims < tl.where(slot >= 0, HALF, 0)
    if head >= HEADS + KV_HEADS:
        to_ptr = value_pool_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * SIZE
        tl.store(to_ptr + dims, first, mask=is_stored)
        tl.store(to_ptr + HALF + dims, second, mask=is_stored)
    else:
        if KIND > 0:
            weights = norm_ptr + head * SIZE + dims
            first_weight = tl.load(weights, mask=is_there, other=0.0).to(tl.float32)
            second_weight = tl.load(weights + HALF, mask=is_there, other=0.0).to(tl.float32)
            mean = (tl.sum(first * first) + tl.sum(second * second)) / SIZE
            factor = tl.rsqrt(mean + eps)
            first, second = first * factor, second * factor
            if KIND == 1:
                first = first.to(dtype).to(tl.float32) * first_weight
                second = second.to(dtype).to(tl.float32) * second_weight
            elif KIND == 2:
                first, second = first * first_weight, second * second_weight
            else:
                first, second = first * (1.0 + first_weight), second * (1.0 + second_weight)
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        angles = rotation_ptr + row * SIZE + dims
        cos = tl.load(angles, mask=is_there, other=0.0).to(tl.float32)
        sin = tl.load(angles + HALF, mask=is_there, other=0.0).to(tl.float32)
        turned = (first * cos - second * sin).to(dtype)
        turned_second = (second * cos + first * sin).to(dtype)
        if head < HEADS:
            to_ptr = query_ptr + (row * HEADS + head) * SIZE
            tl.store(to_ptr + dims, turned, mask=is_there)
            tl.store(to_ptr + HALF + dims, turned_second, mask=is_there)
        else:
            to_ptr = key_pool_ptr + (slot * KV_HEADS + head - HEADS) * SIZE
            tl.store(to_ptr + dims, turned, mask=is_stored)
            tl.store(to_ptr + HALF + dims, turned_second, mask=is_stored)


def rotate_rows(
    product_TE: Tensor,
    rotation: "Rotation",
    layout: "HeadLayout",
    memory: tuple[Tensor, Tensor | None, Tensor | None],
) -> Tensor:
    """Queries; keys, values and slots are in `memory`, values and slots None where they stay."""
    keys, values, slots_T = memory
    num_rows, size, norm = product_TE.shape[0], layout.head_dim, layout.norm
    query_THD = product_TE.new_empty(num_rows, layout.num_heads, size)
    if num_rows == 0:
        return query_THD
    num_programs = layout.num_heads + layout.num_kv_heads * (1 if values is None else 2)
    _rotate_kernel[(num_rows, num_programs)](
        product_TE,
        rotation.rows_TD,
        product_TE if norm is None else norm.weight_D,
        query_THD,
        keys,
        keys if values is None else values,
        rotation.rows_TD if slots_T is None else slots_T,
        product_TE.stride(0),
        0.0 if norm is None else norm.eps,
        HEADS=layout.num_heads,
        KV_HEADS=layout.num_kv_heads,
        SIZE=size,
        HALF=size // 2,
        BLOCK=power_of_two(size // 2),
        KIND=NORM_KINDS[None if norm is None else norm.kind],
        HAS_SLOTS=slots_T is not None,
        num_warps=1,
    )
    return query_THD
