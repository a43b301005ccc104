"""x W^T + b, with weights packed where that pays.

On a CPU in float32, torch's own product over 2 to 32 rows costs up to three times as much as over
one, and a row's sum depends on how many rows are beside it. MKL reads weights that were laid out
for it once: 8 rows then cost little more than one, and a row comes out the same in any company. On
AMD's processors only multiples of four rows do; among others a sum may be rounded in another order.
The packed weights are a second copy, so they are made only where there is room.

Legend: T rows, N outputs, K inputs.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.store.capacity import available_memory

_PACKED_FOR_ROWS = 128
"""Packed for fewer rows, more rows are slower; packed for this many, few are as fast."""

_ROOM_SHARE = 0.25
"""Of the memory that is free: what packed copies of all weights may take."""


class Product:
    """One matrix, multiplied by whatever comes."""

    def __init__(
        self,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        *,
        is_packed: bool,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """`sizes` are the rows of the matrices it was joined of."""
        self.weight_NK, self.bias_N = weight_NK, bias_N
        self.sizes = tuple(sizes or (weight_NK.shape[0],))
        self._packed: Tensor | None = None
        if is_packed:
            self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight_NK, _PACKED_FOR_ROWS)

    def __call__(self, rows_TK: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(rows_TK, self.weight_NK, self.bias_N)
        out_TN: Tensor = torch.ops.mkl._mkl_linear(
            rows_TK, self._packed, self.weight_NK, self.bias_N, rows_TK.shape[0]
        )
        return out_TN


def can_be_packed(weight: Tensor, num_bytes: int) -> bool:
    """Whether packing pays for weights like this one, which take so many bytes together."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _has_packing():
        return False
    available = available_memory()
    return available is not None and num_bytes <= available * _ROOM_SHARE


def _has_packing() -> bool:
    return (
        torch._C.has_mkl
        and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")
        and hasattr(torch.ops.mkl, "_mkl_linear")
    )
