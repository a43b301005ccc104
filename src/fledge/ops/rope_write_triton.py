"""Norming, rotating and storing what a layer projects, in one launch: some heads to a program.

Legend: T tokens, H query heads, G key heads, D head size; N heads of a program, I half a head.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.launch_chain_triton import call_next, chained, wait_for_inputs
from fledge.ops.norms_triton import NORM_KINDS, scale_normed
from fledge.ops.paged_shape import power_of_two

if TYPE_CHECKING:
    from fledge.ops.rope_write import HeadLayout, Rotation


_MANY_HEADS = 2048
"""Of all rows, from which on programs of several warps are faster."""


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
    AT_ONCE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    if IS_CHAINED:
        wait_for_inputs()
        call_next()
    TURNED: tl.constexpr = HEADS + KV_HEADS
    row, dims = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    head = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[:, None]
    is_there = (head < TURNED + (KV_HEADS if HAS_VALUES else 0)) & (dims < HALF)
    is_turned = (head < TURNED) & (dims < HALF)
    dtype = query_ptr.dtype.element_ty
    # All that is read is asked for before anything of it is used.
    slot = row
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + row)
    from_ptrs = product_ptr + row * product_stride_t + head * SIZE + dims
    raw_first = tl.load(from_ptrs, mask=is_there, other=0.0)
    raw_second = tl.load(from_ptrs + HALF, mask=is_there, other=0.0)
    angles = rotation_ptr + row * SIZE + dims
    cos = tl.load(angles, mask=dims < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angles + HALF, mask=dims < HALF, other=0.0).to(tl.float32)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if KIND > 0:
        weights = norm_ptr + head * SIZE + dims
        first_weight = tl.load(weights, mask=is_turned, other=0.0).to(tl.float32)
        second_weight = tl.load(weights + HALF, mask=is_turned, other=0.0).to(tl.float32)
        mean = tl.sum(first * first + second * second, axis=1, keep_dims=True) / SIZE
        factor = tl.rsqrt(mean + eps)
        first = scale_normed(first * factor, first_weight, KIND, dtype)
        second = scale_normed(second * factor, second_weight, KIND, dtype)
    turned = (first * cos - second * sin).to(dtype)
    turned_second = (second * cos + first * sin).to(dtype)
    to_ptrs = query_ptr + (row * HEADS + head) * SIZE + dims
    is_query = is_turned & (head < HEADS)
    tl.store(to_ptrs, turned, mask=is_query)
    tl.store(to_ptrs + HALF, turned_second, mask=is_query)
    to_ptrs = key_pool_ptr + (slot * KV_HEADS + head - HEADS) * SIZE + dims
    # Without a slot, no head is one that is stored.
    is_key = is_turned & (head >= tl.where(slot >= 0, HEADS, TURNED))
    tl.store(to_ptrs, turned, mask=is_key)
    tl.store(to_ptrs + HALF, turned_second, mask=is_key)
    if HAS_VALUES:
        to_ptrs = value_pool_ptr + (slot * KV_HEADS + head - TURNED) * SIZE + dims
        is_value = is_there & (head >= tl.where(slot >= 0, TURNED, TURNED + KV_HEADS))
        tl.store(to_ptrs, raw_first, mask=is_value)
        tl.store(to_ptrs + HALF, raw_second, mask=is_value)


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
    num_heads = layout.num_heads + layout.num_kv_heads * (1 if values is None else 2)
    at_once, num_warps = _heads_at_once(num_rows, num_heads, size)
    _rotate_kernel[(num_rows, triton.cdiv(num_heads, at_once))](
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
        AT_ONCE=at_once,
        KIND=NORM_KINDS[None if norm is None else norm.kind],
        HAS_SLOTS=slots_T is not None,
        HAS_VALUES=values is not None,
        **chained(product_TE.device),
        num_warps=num_warps,
    )
    return query_THD


def _heads_at_once(num_rows: int, num_heads: int, size: int) -> tuple[int, int]:
    """Heads of a program, and its warps: a thread has eight numbers of each half of a head."""
    of_warp = max(1, 256 // power_of_two(size // 2))
    num_warps = 4 if num_rows * num_heads > _MANY_HEADS else 1
    return of_warp * num_warps, num_warps
