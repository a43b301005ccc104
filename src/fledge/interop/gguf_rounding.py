"""A head's matrices rounded to one of llama.cpp's block formats.

Drafting reads the whole head once for each drafted token, so on a CPU its bytes are its time. What
is rounded are the drafts; the target checks them as before.
"""

import copy

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from torch import Tensor

from fledge.contracts.dialects import HeadPrecision
from fledge.models.head import Eagle3Head

_TYPES: dict[HeadPrecision, GGMLQuantizationType] = {
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_0": GGMLQuantizationType.Q4_0,
}
_BLOCK = 32
_TINY = 1e-30
"""Far below what a block's scale, a float16, can hold, and large enough to divide by."""


def block_type(tensor: Tensor, precision: HeadPrecision | None) -> GGMLQuantizationType | None:
    """The format a tensor is rounded to; None where it keeps its own."""
    is_rounded = precision is not None and tensor.ndim == 2 and tensor.shape[1] % _BLOCK == 0
    return _TYPES[precision] if precision is not None and is_rounded else None


def round_to_blocks(tensor: Tensor, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """The bytes of a matrix in a block format.

    Rows that weight decay has shrunk to almost nothing are zeros in it, and made zeros before: the
    inverse of such a block's scale would be infinite.
    """
    values = tensor.detach().float().numpy()
    rounded: NDArray[np.uint8] = quantize(np.where(np.abs(values) < _TINY, 0, values), kind)
    return rounded


def rounded_head(head: Eagle3Head, precision: HeadPrecision) -> Eagle3Head:
    """The head that llama.cpp computes with: rounded values, in float32, which holds them all."""
    copied = copy.deepcopy(head).float()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.copy_(_rounded(parameter, precision))
    if copied.own_embedding is not None:
        copied.own_embedding = _rounded(copied.own_embedding, precision)
    return copied


def _rounded(tensor: Tensor, precision: HeadPrecision) -> Tensor:
    kind = block_type(tensor, precision)
    if kind is None:
        return tensor
    return torch.from_numpy(dequantize(round_to_blocks(tensor, kind), kind))
