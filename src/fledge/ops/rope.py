"""Rotary position embedding, half-split layout (Llama's).

Legend: T tokens, H heads, D head size.
"""

import torch
from torch import Tensor


def default_frequencies(head_dim: int, theta: float) -> Tensor:
    """Inverse wavelengths, float32 [D/2], always on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / theta**exponents


def rotate(states_THD: Tensor, positions_T: Tensor, frequencies: Tensor, scale: float) -> Tensor:
    """Rotate queries or keys to their positions; angles are computed in float32."""
    angles = positions_T.float()[:, None] * frequencies[None, :]
    cos = (torch.cat([angles.cos()] * 2, dim=-1) * scale).to(states_THD.dtype)[:, None, :]
    sin = (torch.cat([angles.sin()] * 2, dim=-1) * scale).to(states_THD.dtype)[:, None, :]
    first, second = states_THD.chunk(2, dim=-1)
    return states_THD * cos + torch.cat([-second, first], dim=-1) * sin
