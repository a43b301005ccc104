"""Both halves of a head's input picked and normed in one launch, a program for each half of a row.

Legend: T tokens, V vocabulary, D hidden size, X rows that hidden states are picked from, E = 2 D.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.norms_triton import NORM_KINDS, norm_block, num_warps_for
from fledge.ops.paged_shape import power_of_two

if TYPE_CHECKING:
    from fledge.ops.norms import Norm


@triton.jit
def _join_kernel(
    tokens_ptr,
    embedding_ptr,
    hidden_ptr,
    rows_ptr,
    embed_norm_ptr,
    hidden_norm_ptr,
    joined_ptr,
    kept_ptr,
    embedding_stride,
    hidden_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    KEEPS_NORMED: tl.constexpr,
):
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    is_there = columns < SIZE
    dtype = joined_ptr.dtype.element_ty
    if half == 0:
        from_ptr = embedding_ptr + tl.load(tokens_ptr + row) * embedding_stride
        weights = tl.load(embed_norm_ptr + columns, mask=is_there, other=0.0).to(tl.float32)
    else:
        from_ptr = hidden_ptr + tl.load(rows_ptr + row) * hidden_stride
        weights = tl.load(hidden_norm_ptr + columns, mask=is_there, other=0.0).to(tl.float32)
    values = tl.load(from_ptr + columns, mask=is_there, other=0.0).to(tl.float32)
    normed = norm_block(values, weights, eps, SIZE, KIND, dtype)
    to_ptr = joined_ptr + row * 2 * SIZE + half * SIZE
    tl.store(to_ptr + columns, normed.to(dtype), mask=is_there)
    if KEEPS_NORMED:
        values = normed
    is_kept = columns < tl.where(half == 1, SIZE, 0)
    tl.store(kept_ptr + row * SIZE + columns, values.to(dtype), mask=is_kept)


def join_rows(
    token_ids_T: Tensor,
    embedding_VD: Tensor,
    hidden_XD: Tensor,
    rows_T: Tensor,
    norms: "tuple[Norm, Norm]",
    *,
    keeps_normed: bool,
) -> tuple[Tensor, Tensor]:
    """The twin is `join_inputs` by plain operations; both norms have one kind and one eps."""
    num_rows, size = token_ids_T.shape[0], hidden_XD.shape[1]
    joined_TE = hidden_XD.new_empty(num_rows, 2 * size)
    kept_TD = hidden_XD.new_empty(num_rows, size)
    if num_rows == 0:
        return joined_TE, kept_TD
    _join_kernel[(num_rows, 2)](
        token_ids_T,
        embedding_VD,
        hidden_XD,
        rows_T,
        norms[0].weight_D,
        norms[1].weight_D,
        joined_TE,
        kept_TD,
        embedding_VD.stride(0),
        hidden_XD.stride(0),
        norms[0].eps,
        SIZE=size,
        BLOCK=power_of_two(size),
        KIND=NORM_KINDS[norms[0].kind],
        KEEPS_NORMED=keeps_normed,
        num_warps=num_warps_for(size, hidden_XD.dtype),
    )
    return joined_TE, kept_TD
