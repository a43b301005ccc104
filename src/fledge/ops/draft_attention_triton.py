"""The kernels of `key_merge`: one program for each token and key head, all its query heads at once.

Legend: S merged keys, T tokens, H query heads, G key heads, D head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.document_flash import Attended
from fledge.ops.key_merge import MergeGradients


@triton.jit
def _merge_kernel(
    query_ptr,
    first_ptr,
    lse_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    out_lse_ptr,
    num_tokens,
    scale,
    NUM_KEYS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    member = tl.arange(0, GROUP_BLOCK)
    lane = tl.arange(0, HEAD_BLOCK)
    head = group * GROUP + member
    is_lane = lane < HEAD_SIZE
    is_own = (member < GROUP)[:, None] & is_lane[None, :]
    place = head[:, None] * HEAD_SIZE + lane[None, :]
    dense = token * (NUM_GROUPS * GROUP * HEAD_SIZE) + place
    query = tl.load(query_ptr + dense, is_own, 0.0).to(tl.float32)
    out = tl.load(first_ptr + dense, is_own, 0.0).to(tl.float32)
    lse_place = head.to(tl.int64) * num_tokens + token
    lse = tl.load(lse_ptr + lse_place, member < GROUP, 0.0)
    # `out` is kept relative to the running maximum, as in flash attention.
    top = lse
    total = tl.full([GROUP_BLOCK], 1.0, tl.float32)
    is_empty = lse == float("-inf")
    total = tl.where(is_empty, 0.0, total)
    for number in tl.static_range(NUM_KEYS):
        at = ((number * num_tokens + token) * NUM_GROUPS + group) * HEAD_SIZE + lane
        key = tl.load(keys_ptr + at, is_lane, 0.0).to(tl.float32)
        value = tl.load(values_ptr + at, is_lane, 0.0).to(tl.float32)
        score = tl.sum(query * key[None, :], axis=1) * scale
        higher = tl.maximum(top, score)
        shrunk = tl.exp(top - higher)
        weight = tl.exp(score - higher)
        total = total * shrunk + weight
        out = out * shrunk[:, None] + weight[:, None] * value[None, :]
        top = higher
    out = out / total[:, None]
    tl.store(out_ptr + dense, out.to(out_ptr.dtype.element_ty), is_own)
    tl.store(out_lse_ptr + lse_place, top + tl.log(total), member < GROUP)


@triton.jit
def _merge_backward_kernel(
    grad_ptr,
    query_ptr,
    out_ptr,
    lse_ptr,
    keys_ptr,
    values_ptr,
    query_grad_ptr,
    keys_grad_ptr,
    values_grad_ptr,
    num_tokens,
    scale,
    NUM_KEYS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    member = tl.arange(0, GROUP_BLOCK)
    lane = tl.arange(0, HEAD_BLOCK)
    head = group * GROUP + member
    is_lane = lane < HEAD_SIZE
    is_own = (member < GROUP)[:, None] & is_lane[None, :]
    place = head[:, None] * HEAD_SIZE + lane[None, :]
    dense = token * (NUM_GROUPS * GROUP * HEAD_SIZE) + place
    query = tl.load(query_ptr + dense, is_own, 0.0).to(tl.float32)
    grad = tl.load(grad_ptr + dense, is_own, 0.0).to(tl.float32)
    out = tl.load(out_ptr + dense, is_own, 0.0).to(tl.float32)
    query_grad = tl.load(query_grad_ptr + dense, is_own, 0.0).to(tl.float32)
    lse = tl.load(lse_ptr + head.to(tl.int64) * num_tokens + token, member < GROUP, 0.0)
    delta = tl.sum(grad * out, axis=1)
    for number in tl.static_range(NUM_KEYS):
        at = ((number * num_tokens + token) * NUM_GROUPS + group) * HEAD_SIZE + lane
        key = tl.load(keys_ptr + at, is_lane, 0.0).to(tl.float32)
        value = tl.load(values_ptr + at, is_lane, 0.0).to(tl.float32)
        prob = tl.exp(tl.sum(query * key[None, :], axis=1) * scale - lse)
        slope = prob * (tl.sum(grad * value[None, :], axis=1) - delta) * scale
        query_grad += slope[:, None] * key[None, :]
        key_grad = tl.sum(slope[:, None] * query, axis=0)
        value_grad = tl.sum(prob[:, None] * grad, axis=0)
        tl.store(keys_grad_ptr + at, key_grad.to(keys_grad_ptr.dtype.element_ty), is_lane)
        tl.store(values_grad_ptr + at, value_grad.to(values_grad_ptr.dtype.element_ty), is_lane)
    tl.store(query_grad_ptr + dense, query_grad.to(query_grad_ptr.dtype.element_ty), is_own)


def merge_fused(
    query_THD: Tensor, attended: Attended, keys_STGD: Tensor, values_STGD: Tensor, scale: float
) -> Attended:
    """`key_merge.merge_plain` in one kernel; all is contiguous."""
    out_THD, lse_HT = torch.empty_like(attended.out_AHD), torch.empty_like(attended.lse_HA)
    shape = _shape(query_THD, keys_STGD)
    _merge_kernel[(query_THD.shape[0], keys_STGD.shape[2])](
        query_THD,
        attended.out_AHD,
        attended.lse_HA,
        keys_STGD,
        values_STGD,
        out_THD,
        lse_HT,
        query_THD.shape[0],
        scale,
        **shape,
        num_warps=1,
    )
    return Attended(out_THD, lse_HT)


def merge_backward_fused(
    grad_THD: Tensor,
    query_THD: Tensor,
    merged: Attended,
    keys_STGD: Tensor,
    values_STGD: Tensor,
    scale: float,
    *,
    query_grad_THD: Tensor,
) -> MergeGradients:
    """`key_merge.merge_backward_plain` in one kernel; adds to the query's gradient in place."""
    keys_grad_STGD, values_grad_STGD = torch.empty_like(keys_STGD), torch.empty_like(values_STGD)
    query_grad_THD = query_grad_THD.contiguous()
    shape = _shape(query_THD, keys_STGD)
    _merge_backward_kernel[(query_THD.shape[0], keys_STGD.shape[2])](
        grad_THD.contiguous(),
        query_THD,
        merged.out_AHD,
        merged.lse_HA,
        keys_STGD,
        values_STGD,
        query_grad_THD,
        keys_grad_STGD,
        values_grad_STGD,
        query_THD.shape[0],
        scale,
        **shape,
        num_warps=1,
    )
    return MergeGradients(query_grad_THD, keys_grad_STGD, values_grad_STGD)


def _shape(query_THD: Tensor, keys_STGD: Tensor) -> dict[str, int]:
    """Constants of both kernels."""
    num_keys, _, num_groups, head_size = keys_STGD.shape
    group = query_THD.shape[1] // num_groups
    return {
        "NUM_KEYS": num_keys,
        "NUM_GROUPS": num_groups,
        "GROUP": group,
        "GROUP_BLOCK": triton.next_power_of_2(group),
        "HEAD_SIZE": head_size,
        "HEAD_BLOCK": triton.next_power_of_2(head_size),
    }
