"""Names of tensors in GGUF files, and what llama.cpp wants of their values.

Rows of the query and key projections are stored in another order: llama.cpp rotates neighbours,
everybody else the two halves of a head.
"""

import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from fledge.contracts.errors import MismatchError

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
}
_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}


def pair_rows(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a rotated projection in llama.cpp's order."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def unpair_rows(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a rotated projection in everybody else's order."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def stored_type(tensor: Tensor) -> GGMLQuantizationType:
    """Matrices keep their type; vectors are float32, which llama.cpp needs of norms."""
    if tensor.dtype not in _TYPES:
        raise MismatchError(
            f"a tensor of type {str(tensor.dtype).removeprefix('torch.')} cannot be written as "
            "GGUF; float32, float16 and bfloat16 can."
        )
    return GGMLQuantizationType.F32 if tensor.ndim == 1 else _TYPES[tensor.dtype]


def stored_values(tensor: Tensor) -> NDArray[np.generic]:
    """The bytes of a tensor in its stored type; numpy has no bfloat16, its bits go as uint8."""
    if stored_type(tensor) == GGMLQuantizationType.F32:
        return tensor.float().contiguous().numpy()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint8).numpy()
    return tensor.contiguous().numpy()
