"""The head's layer with matrices that read the same thing joined, for training.

Query, keys and values read the embedding and the hidden state side by side. What they make of an
embedding is the same at every step, only at another index: it is computed once for all of them. The
rest, and the two matrices that the MLP starts with, are one product each.

Legend: T tokens, D hidden size, Q query, key and value sizes together, M twice the MLP's width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.models.head import AttentionInput, Eagle3Head, HeadLayer, HeadOutput


class JoinedWeights(NamedTuple):
    embed_QD: Tensor
    hidden_QD: Tensor
    bias_Q: Tensor | None
    gate_up_MD: Tensor


def join_weights(layer: HeadLayer) -> JoinedWeights:
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    halves = [part.weight.view(part.weight.shape[0], 2, -1).unbind(1) for part in parts]
    has_bias = attention.q_proj.bias is not None
    return JoinedWeights(
        embed_QD=torch.cat([embed for embed, _ in halves]),
        hidden_QD=torch.cat([hidden for _, hidden in halves]),
        bias_Q=torch.cat([part.bias for part in parts]) if has_bias else None,
        gate_up_MD=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
    )


def read_embeddings(layer: HeadLayer, joined: JoinedWeights, embeds_TD: Tensor) -> Tensor:
    """What query, keys and values make of each token's embedding, [T, Q]."""
    return F.linear(layer.input_layernorm(embeds_TD), joined.embed_QD, joined.bias_Q)


def before_attention(
    layer: HeadLayer, hidden_QD: Tensor, read_TQ: Tensor, hidden_TD: Tensor, positions_T: Tensor
) -> AttentionInput:
    """`HeadLayer.before_attention` of embeddings that are already read."""
    attention = layer.self_attn
    normed_TD = layer.hidden_norm(hidden_TD)
    residual_TD = normed_TD if layer.norm_before_residual else hidden_TD
    projected_TQ = torch.addmm(read_TQ, normed_TD, hidden_QD.T)
    sizes = [part.weight.shape[0] for part in (attention.q_proj, attention.k_proj)]
    query_TQ, keys_TE, values_TE = projected_TQ.tensor_split((sizes[0], sum(sizes)), dim=-1)
    # Values alone are kept for later: a view would keep all three.
    placed = attention.place(query_TQ, keys_TE, values_TE.contiguous(), positions_T)
    return AttentionInput(residual_TD, *placed)


def after_attention(
    head: Eagle3Head, gate_up_MD: Tensor, residual_TD: Tensor, attended_THD: Tensor
) -> HeadOutput:
    """`HeadLayer.after_attention` and the head's last norm."""
    layer = head.midlayer
    hidden_TD = residual_TD + layer.self_attn.o_proj(attended_THD.flatten(1))
    joined_TM = F.linear(layer.post_attention_layernorm(hidden_TD), gate_up_MD)
    gate_TI, up_TI = joined_TM.chunk(2, dim=-1)
    return head.finish(hidden_TD + layer.mlp.down_proj(F.silu(gate_TI) * up_TI))
