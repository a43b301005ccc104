"""What a head leaves of tokens that nobody drafts from: keys and values, and nothing behind them.

Of a prompt only the newest token starts a tree. The others are read for what later ones attend to,
which needs no query, no attention and no MLP.

Legend: T tokens, D hidden size, G key heads.
"""

import torch
from torch import Tensor

from fledge.models.head import Eagle3Head
from fledge.ops.rope import rotate


def head_entries(
    head: Eagle3Head, embeds_TD: Tensor, hidden_TD: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values [T, G, head size] of tokens, from the hidden state before each."""
    layer, attention = head.midlayer, head.midlayer.self_attn
    x_TE = torch.cat([layer.input_layernorm(embeds_TD), layer.hidden_norm(hidden_TD)], dim=-1)
    shape = (x_TE.shape[0], -1, attention.head_dim)
    keys, values = attention.k_proj(x_TE).view(shape), attention.v_proj(x_TE).view(shape)
    if attention.has_qk_norm:
        keys = attention.k_norm(keys)
    frequencies = attention.frequencies(positions_T.device)
    return rotate(keys, positions_T, frequencies, attention.rope_scale), values
