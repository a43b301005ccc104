"""Rows of experts times the experts' own matrices, in one launch for all of them.

Rows lie sorted by expert; how many each expert has is known on the device only. Programs are laid
out for the most blocks of rows there can be, one more than full ones for every expert that can have
rows; each finds its expert and its rows from where the experts' rows end, and those behind the last
block do nothing. Weights of experts without rows are never read.

Legend: S rows, X experts, N outputs, K inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.paged_shape import power_of_two


@triton.jit
def _grouped_kernel(
    inputs_ptr,
    weights_ptr,
    out_ptr,
    ends_ptr,
    N,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    block, part = tl.program_id(1), tl.program_id(0)
    numbers = tl.arange(0, EXPERTS)
    is_expert = numbers < NUM_EXPERTS
    ends = tl.load(ends_ptr + numbers, mask=is_expert, other=0)
    begins = tl.load(ends_ptr + numbers - 1, mask=is_expert & (numbers > 0), other=0)
    num_blocks = tl.where(is_expert, (ends - begins + BLOCK_M - 1) // BLOCK_M, 0)
    last_block = tl.cumsum(num_blocks, axis=0)
    expert = tl.sum((last_block <= block).to(tl.int32), axis=0)
    if expert < NUM_EXPERTS:
        is_mine = numbers == expert
        begin = tl.sum(tl.where(is_mine, begins, 0), axis=0)
        end = tl.sum(tl.where(is_mine, ends, 0), axis=0)
        first = tl.sum(tl.where(is_mine, last_block - num_blocks, 0), axis=0)
        rows = begin + (block - first) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = part * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_column = rows < end, columns < N
        dims = tl.arange(0, BLOCK_K)
        row_ptrs = inputs_ptr + rows.to(tl.int64)[:, None] * K + dims[None, :]
        weights_ptr += expert.to(tl.int64) * N * K
        weight_ptrs = weights_ptr + columns.to(tl.int64)[None, :] * K + dims[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            is_dim = dims < K - start
            left = tl.load(row_ptrs + start, mask=is_row[:, None] & is_dim[None, :], other=0.0)
            right = tl.load(
                weight_ptrs + start, mask=is_column[None, :] & is_dim[:, None], other=0.0
            )
            if IS_EXACT:
                total += tl.dot(left, right, input_precision="ieee")
            else:
                total += tl.dot(left, right)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        is_there = is_row[:, None] & is_column[None, :]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_there)


def multiply_grouped(rows_SK: Tensor, weights_XNK: Tensor, ends_X: Tensor) -> Tensor:
    """Each expert's rows times its own matrix; `ends` says where its rows end."""
    num_rows, num_experts, num_outputs = rows_SK.shape[0], *weights_XNK.shape[:2]
    out_SN = rows_SK.new_empty(num_rows, num_outputs)
    if num_rows == 0:
        return out_SN
    is_float = rows_SK.dtype == torch.float32
    # Few rows are spread over many experts: blocks of what an expert gets on average.
    block_m = max(16, min(64, power_of_two(-(-num_rows // num_experts))))
    block_n, block_k = (32, 32) if is_float else (64, 64)
    num_blocks = num_rows // block_m + min(num_experts, num_rows)
    _grouped_kernel[(triton.cdiv(num_outputs, block_n), num_blocks)](
        rows_SK.contiguous(),
        weights_XNK,
        out_SN,
        ends_X,
        num_outputs,
        NUM_EXPERTS=num_experts,
        EXPERTS=power_of_two(num_experts),
        K=rows_SK.shape[1],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        IS_EXACT=is_float,
        num_warps=4,
        num_stages=3,
    )
    return out_SN
