"""act(gate) * up in one launch, a program for a part of each row.

Legend: T tokens, I width of each half.
"""

import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.launch_chain_triton import chained, wait_for_inputs
from fledge.ops.paged_shape import power_of_two

_COLUMNS = 1024
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def gate_block(gate, up, IS_SILU: tl.constexpr, DTYPE: tl.constexpr):
    """Rounded where the plain operations round; float32 in and out."""
    if IS_SILU:
        # By an exponential that cannot overflow.
        small = tl.exp(-tl.abs(gate))
        active = gate * tl.where(gate < 0, small, 1.0) / (1.0 + small)
    else:
        inner = _SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
        small = tl.exp(-2.0 * tl.abs(inner))
        tanh = (1.0 - small) / (1.0 + small)
        active = 0.5 * gate * (1.0 + tl.where(inner < 0, -tanh, tanh))
    return active.to(DTYPE).to(tl.float32) * up


@triton.jit
def _gate_kernel(
    both_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_SILU: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    if IS_CHAINED:
        wait_for_inputs()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    is_there = columns < SIZE
    dtype = out_ptr.dtype.element_ty
    both_ptr += row * 2 * SIZE
    gate = tl.load(both_ptr + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + SIZE + columns, mask=is_there, other=0.0).to(tl.float32)
    out = gate_block(gate, up, IS_SILU, dtype)
    tl.store(out_ptr + row * SIZE + columns, out.to(dtype), mask=is_there)


def gate_rows(gate_up_TJ: Tensor, activation: str) -> Tensor:
    """The twin is `gated` by plain operations."""
    num_rows, width = gate_up_TJ.shape
    size = width // 2
    out_TI = gate_up_TJ.new_empty(num_rows, size)
    if num_rows == 0:
        return out_TI
    columns = min(_COLUMNS, power_of_two(size))
    _gate_kernel[(num_rows, triton.cdiv(size, columns))](
        gate_up_TJ.contiguous(),
        out_TI,
        SIZE=size,
        COLUMNS=columns,
        IS_SILU=activation == "silu",
        **chained(gate_up_TJ.device),
        num_warps=4,
    )
    return out_TI
