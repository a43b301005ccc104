"""act(gate) * up over the two halves of one product.

Legend: T tokens, I width of each half.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels
from fledge.ops.norms import is_close

Activation = Literal["silu", "gelu_tanh"]
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_DIFFERENCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


def gated(gate_up_TJ: Tensor, activation: Activation) -> Tensor:
    """[T, I] of [T, 2 I], gates first."""

    def gate_plain() -> Tensor:
        gate, up = gate_up_TJ.chunk(2, dim=-1)
        return activate(gate, activation) * up

    if not (uses_kernels(gate_up_TJ) and gate_up_TJ.dtype in _DTYPES):
        return gate_plain()

    def gate_fused() -> Tensor:
        from fledge.ops.gated_triton import gate_rows

        with on_device(gate_up_TJ):
            return gate_rows(gate_up_TJ, activation)

    def is_right(found_TI: Tensor) -> bool:
        return is_close(found_TI, gate_plain(), _MOST_DIFFERENCE[found_TI.dtype])

    kind = (gate_up_TJ.dtype, gate_up_TJ.shape[1], activation)
    return run_kernel("gates", gate_fused, gate_plain, kind=kind, is_right=is_right)


def activate(gate: Tensor, activation: Activation) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
