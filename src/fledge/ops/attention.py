"""Attention of a packed pass over cached keys.

`attend_plain` is the reference: every score in view. `attend_fast` uses torch's fused attention
where it can express the layer (no soft-cap, no sinks) and the reference elsewhere; `attend_padded`
does so for many short requests in one call. All honour visibility and the layer's window.

Legend: T tokens of the pass, Q of one segment, K keys, H query heads, G key heads, D head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.ops.packed import PaddedRequests, Segment


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer asks of attention beyond queries, keys and values."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks_H: Tensor | None = None


def attend_plain(
    query_QHD: Tensor, keys_KGD: Tensor, values_KGD: Tensor, segment: Segment, spec: AttentionSpec
) -> Tensor:
    """Attention of one segment, written out; returns [Q, H, D]."""
    num_groups = query_QHD.shape[1] // keys_KGD.shape[1]
    keys_HKD = keys_KGD.transpose(0, 1).repeat_interleave(num_groups, dim=0)
    values_HKD = values_KGD.transpose(0, 1).repeat_interleave(num_groups, dim=0)
    scores_HQK = (query_QHD.transpose(0, 1) @ keys_HKD.transpose(1, 2)).float() * spec.scale
    if spec.soft_cap is not None:
        scores_HQK = spec.soft_cap * torch.tanh(scores_HQK / spec.soft_cap)
    mask_QK = segment.mask(spec.window)
    if mask_QK is not None:
        scores_HQK = scores_HQK.masked_fill(~mask_QK, float("-inf"))
    if spec.sinks_H is not None:
        sinks_HQ1 = spec.sinks_H.float()[:, None, None].expand(-1, scores_HQK.shape[1], 1)
        probs_HQK = torch.cat([scores_HQK, sinks_HQ1], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probs_HQK = scores_HQK.softmax(dim=-1)
    return (probs_HQK.to(values_HKD.dtype) @ values_HKD).transpose(0, 1)


def attend_fast(
    query_QHD: Tensor, keys_KGD: Tensor, values_KGD: Tensor, segment: Segment, spec: AttentionSpec
) -> Tensor:
    """Attention of one segment through torch's fused kernel; returns [Q, H, D]."""
    if not can_be_padded(spec):
        return attend_plain(query_QHD, keys_KGD, values_KGD, segment, spec)
    is_causal = segment.is_whole_causal(spec.window)
    out_1HQD = F.scaled_dot_product_attention(
        query_QHD.transpose(0, 1)[None],
        keys_KGD.transpose(0, 1)[None],
        values_KGD.transpose(0, 1)[None],
        attn_mask=None if is_causal else segment.mask(spec.window),
        is_causal=is_causal,
        scale=spec.scale,
        enable_gqa=query_QHD.shape[1] != keys_KGD.shape[1],
    )
    return out_1HQD[0].transpose(0, 1)


def can_be_padded(spec: AttentionSpec) -> bool:
    """Whether torch's fused attention can express the layer."""
    return spec.soft_cap is None and spec.sinks_H is None


def attend_padded(
    query_THD: Tensor,
    keys_BKGD: Tensor,
    values_BKGD: Tensor,
    padded: PaddedRequests,
    spec: AttentionSpec,
) -> Tensor:
    """Attention of the padded requests; returns [T, H, D] for their rows of the pass."""
    out_BHQD = F.scaled_dot_product_attention(
        query_THD[padded.rows_BQ].transpose(1, 2),
        keys_BKGD.transpose(1, 2),
        values_BKGD.transpose(1, 2),
        attn_mask=padded.mask_BQK[:, None],
        scale=spec.scale,
        enable_gqa=query_THD.shape[1] != keys_BKGD.shape[2],
    )
    request_T, row_T = padded.place_T
    return out_BHQD.transpose(1, 2)[request_T, row_T]
