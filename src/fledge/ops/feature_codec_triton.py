"""The kernel of `feature_codec`: one program turns a few blocks into codes and scales.

It gives the bytes of its twin. Values become whole numbers that are cut into two bytes, so that
products in float16 and sums in float32 are exact; what has to be rounded is rounded as IEEE 754
says, where Triton would take something faster.

Legend: G blocks of a row, K values of a block.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS_AT_ONCE = 64
_EXPONENT_MASK = tl.constexpr(0x7F800000)
_LEAST_POWER = tl.constexpr(2.0**-100)
_GRID_STEP = tl.constexpr(2.0**-15)
_HALF_EVEN = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 below 2**22 and taken away again it leaves the nearest whole number."""


@triton.jit
def _whole(values):
    return (values + _HALF_EVEN) - _HALF_EVEN


@triton.jit
def _quantise_kernel(
    features_ptr,
    center_ptr,
    inverse_ptr,
    hadamard_ptr,
    thresholds_ptr,
    codes_ptr,
    scales_ptr,
    row_stride,
    num_blocks,
    root_of_block,
    WIDTH: tl.constexpr,
    TAP_BLOCKS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    HAS_UNITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    lane = tl.arange(0, BLOCK)
    row = block // ROW_BLOCKS
    of_row = (block % ROW_BLOCKS).to(tl.int32)
    of_tap = (of_row % TAP_BLOCKS)[:, None] * BLOCK + lane[None, :]
    column = (of_row // TAP_BLOCKS)[:, None] * WIDTH + of_tap
    is_value = (of_tap < WIDTH) & (block < num_blocks)[:, None]
    values = tl.load(features_ptr + row[:, None] * row_stride + column, is_value, 0.0).to(
        tl.float32
    )
    if HAS_UNITS:
        center = tl.load(center_ptr + column, is_value, 0.0)
        values = (values - center) * tl.load(inverse_ptr + column, is_value, 0.0)

    is_bad = tl.max((tl.abs(values) < float("inf")).to(tl.int32) ^ 1, axis=1) != 0
    values = tl.where(is_bad[:, None], 0.0, values)
    largest = tl.max(tl.abs(values), axis=1)
    power = (largest.to(tl.int32, bitcast=True) & _EXPONENT_MASK).to(tl.float32, bitcast=True)
    step = tl.maximum(power, _LEAST_POWER) * _GRID_STEP
    per_step = tl.div_rn(1.0, step)
    whole = _whole(values * per_step[:, None])
    upper = _whole(whole * (1.0 / 256.0))
    lower = whole - upper * 256.0
    # Rows of the matrix are columns here: what is loaded is its transpose.
    hadamard = tl.load(hadamard_ptr + lane[None, :] * BLOCK + lane[:, None]).to(tl.float16)
    rotated = tl.dot(upper.to(tl.float16), hadamard) * 256.0 + tl.dot(
        lower.to(tl.float16), hadamard
    )

    wide = rotated.to(tl.float64)
    norm = tl.sqrt(tl.sum(wide * wide, axis=1))
    root = tl.sqrt(norm / BLOCK * step.to(tl.float64)).to(tl.float32)
    scale = tl.where(is_bad, float("nan"), root).to(tl.float16)
    wide_scale = scale.to(tl.float32)
    divisor = (wide_scale * wide_scale) * root_of_block * per_step
    is_scaled = divisor > 0.0
    factor = tl.where(is_scaled, tl.div_rn(1.0, tl.where(is_scaled, divisor, 1.0)), 0.0)
    unit = rotated * factor[:, None]
    code = tl.zeros([AT_ONCE, BLOCK], tl.int32)
    for bit in tl.static_range(BITS - 1, -1, -1):
        above = code + (1 << bit)
        code = tl.where(unit >= tl.load(thresholds_ptr + above - 1), above, code)
    tl.store(scales_ptr + block, scale, block < num_blocks)
    place = block[:, None] * BLOCK + lane[None, :]
    tl.store(codes_ptr + place, code.to(tl.uint8), (block < num_blocks)[:, None])


def quantise_rows_fused(
    rows_TN: Tensor,
    units: tuple[Tensor, Tensor] | None,
    hadamard_KK: Tensor,
    thresholds: Tensor,
    *,
    hidden_size: int,
    padded_size: int,
    bits: int,
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [T, padded values] and scales float16 [T, G] of rows of several taps.

    `units` are the channels' centers and what is multiplied with instead of their spreads.
    """
    num_rows, width = rows_TN.shape
    assert rows_TN.stride(1) == 1
    block = len(hadamard_KK)
    row_blocks = width // hidden_size * padded_size // block
    codes_TN = torch.empty((num_rows, row_blocks * block), dtype=torch.uint8, device=rows_TN.device)
    scales_TG = torch.empty((num_rows, row_blocks), dtype=torch.float16, device=rows_TN.device)
    center_N, inverse_N = units or (hadamard_KK, hadamard_KK)
    _quantise_kernel[(triton.cdiv(num_rows * row_blocks, _BLOCKS_AT_ONCE),)](
        rows_TN,
        center_N,
        inverse_N,
        hadamard_KK,
        thresholds,
        codes_TN,
        scales_TG,
        rows_TN.stride(0),
        num_rows * row_blocks,
        math.sqrt(block),
        WIDTH=hidden_size,
        TAP_BLOCKS=padded_size // block,
        ROW_BLOCKS=row_blocks,
        BLOCK=block,
        BITS=bits,
        HAS_UNITS=units is not None,
        AT_ONCE=_BLOCKS_AT_ONCE,
        num_warps=4,
    )
    return codes_TN, scales_TG
