"""Merging a few keys, each seen by its own index only, into attention that is already done.

    out = (sum of the first + exp(s1) v1 + exp(s2) v2 + ...) / (exp(lse) + exp(s1) + exp(s2) + ...)

`merge_plain` and `merge_backward_plain` are the twins of the kernels in `draft_attention_triton`.

Legend: S merged keys, T tokens, H query heads, G key heads, D head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.document_flash import Attended
from fledge.ops.kernel_choice import on_device


class MergeGradients(NamedTuple):
    query_THD: Tensor
    keys_STGD: Tensor
    values_STGD: Tensor


def merge(
    query_THD: Tensor, attended: Attended, keys_STGD: Tensor, values_STGD: Tensor, scale: float
) -> Attended:
    """Attention that has also seen key s of its own index, for all s."""
    if query_THD.is_cuda:
        from fledge.ops.draft_attention_triton import merge_fused

        with on_device(query_THD):
            return merge_fused(query_THD, attended, keys_STGD, values_STGD, scale)
    return merge_plain(query_THD, attended, keys_STGD, values_STGD, scale)


def merge_backward(
    grad_THD: Tensor,
    query_THD: Tensor,
    merged: Attended,
    keys_STGD: Tensor,
    values_STGD: Tensor,
    scale: float,
    *,
    query_grad_THD: Tensor,
) -> MergeGradients:
    """Gradients through the merged keys; that of the query is added to the one given."""
    if query_THD.is_cuda:
        from fledge.ops.draft_attention_triton import merge_backward_fused

        run = merge_backward_fused
    else:
        run = merge_backward_plain
    with on_device(query_THD):
        return run(
            grad_THD,
            query_THD,
            merged,
            keys_STGD,
            values_STGD,
            scale,
            query_grad_THD=query_grad_THD,
        )


def merge_plain(
    query_THD: Tensor, attended: Attended, keys_STGD: Tensor, values_STGD: Tensor, scale: float
) -> Attended:
    num_groups = keys_STGD.shape[2]
    wide = attended.lse_HA.dtype
    query_TGgD = _by_group(query_THD, num_groups).to(wide)
    lse_TGg = attended.lse_HA.T.reshape(query_TGgD.shape[:3])
    scores = [(query_TGgD * keys_TGD[:, :, None]).sum(-1) * scale for keys_TGD in keys_STGD]
    merged_TGg = torch.stack([lse_TGg, *scores]).logsumexp(dim=0)
    out_TGgD = _by_group(attended.out_AHD, num_groups).to(wide)
    out_TGgD = out_TGgD * (lse_TGg - merged_TGg).exp()[..., None]
    for score_TGg, values_TGD in zip(scores, values_STGD, strict=True):
        out_TGgD += (score_TGg - merged_TGg).exp()[..., None] * values_TGD[:, :, None]
    lse_HT = merged_TGg.flatten(1).T.contiguous()
    return Attended(out_TGgD.flatten(1, 2).to(query_THD.dtype), lse_HT)


def merge_backward_plain(
    grad_THD: Tensor,
    query_THD: Tensor,
    merged: Attended,
    keys_STGD: Tensor,
    values_STGD: Tensor,
    scale: float,
    *,
    query_grad_THD: Tensor,
) -> MergeGradients:
    num_groups = keys_STGD.shape[2]
    wide = merged.lse_HA.dtype
    query_TGgD = _by_group(query_THD, num_groups).to(wide)
    grad_TGgD = _by_group(grad_THD, num_groups).to(wide)
    lse_TGg = merged.lse_HA.T.reshape(query_TGgD.shape[:3])
    delta_TGg = (grad_TGgD * _by_group(merged.out_AHD, num_groups)).sum(dim=-1)
    query_grad_TGgD = _by_group(query_grad_THD, num_groups).to(wide)
    keys_grad_STGD, values_grad_STGD = torch.empty_like(keys_STGD), torch.empty_like(values_STGD)
    for number, (keys_TGD, values_TGD) in enumerate(zip(keys_STGD, values_STGD, strict=True)):
        probs_TGg = ((query_TGgD * keys_TGD[:, :, None]).sum(-1) * scale - lse_TGg).exp()
        grad_probs_TGg = (grad_TGgD * values_TGD[:, :, None]).sum(dim=-1)
        slope_TGg = probs_TGg * (grad_probs_TGg - delta_TGg) * scale
        query_grad_TGgD = query_grad_TGgD + slope_TGg[..., None] * keys_TGD[:, :, None]
        keys_grad_STGD[number] = (slope_TGg[..., None] * query_TGgD).sum(dim=2)
        values_grad_STGD[number] = (probs_TGg[..., None] * grad_TGgD).sum(dim=2)
    query_grad_THD = query_grad_TGgD.flatten(1, 2).to(query_THD.dtype)
    return MergeGradients(query_grad_THD, keys_grad_STGD, values_grad_STGD)


def _by_group(states_THD: Tensor, num_groups: int) -> Tensor:
    """[T, G, H/G, D]: query heads beside the key head they read."""
    num_tokens, num_heads, size = states_THD.shape
    return states_THD.reshape(num_tokens, num_groups, num_heads // num_groups, size)
