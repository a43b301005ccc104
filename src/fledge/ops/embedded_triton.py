"""Rows of the embedding with their norm, and of the rotation table, in one launch.

Legend: T tokens, V vocabulary, D width, P positions, I size of a head.
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
def _begin_kernel(
    weight_ptr,
    token_ids_ptr,
    norm_ptr,
    turns_ptr,
    positions_ptr,
    stream_ptr,
    normed_ptr,
    angles_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns, dims = tl.arange(0, BLOCK), tl.arange(0, HEAD_BLOCK)
    is_there, is_dim = columns < SIZE, dims < HEAD_SIZE
    dtype = stream_ptr.dtype.element_ty
    # All that is read is asked for before anything of it is used.
    token, position = tl.load(token_ids_ptr + row), tl.load(positions_ptr + row)
    weights = tl.load(norm_ptr + columns, mask=is_there, other=0.0)
    embedded = tl.load(weight_ptr + token * SIZE + columns, mask=is_there, other=0.0)
    angles = tl.load(turns_ptr + position * HEAD_SIZE + dims, mask=is_dim, other=0.0)
    tl.store(angles_ptr + row * HEAD_SIZE + dims, angles, mask=is_dim)
    tl.store(stream_ptr + row * SIZE + columns, embedded, mask=is_there)
    normed = norm_block(embedded.to(tl.float32), weights.to(tl.float32), eps, SIZE, KIND, dtype)
    tl.store(normed_ptr + row * SIZE + columns, normed.to(dtype), mask=is_there)


def begin_rows(
    weight_VD: Tensor, token_ids_T: Tensor, norm: "Norm", table_PI: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Stream, normed stream and angles; the twin is the plain way of `embed_rows`."""
    num_rows, size, head_size = token_ids_T.shape[0], weight_VD.shape[1], table_PI.shape[1]
    stream_TD, normed_TD = (weight_VD.new_empty(num_rows, size) for _ in range(2))
    angles_TI = table_PI.new_empty(num_rows, head_size)
    if num_rows == 0:
        return stream_TD, normed_TD, angles_TI
    _begin_kernel[(num_rows,)](
        weight_VD,
        token_ids_T.contiguous(),
        norm.weight_D,
        table_PI.contiguous(),
        positions_T.contiguous(),
        stream_TD,
        normed_TD,
        angles_TI,
        norm.eps,
        SIZE=size,
        BLOCK=power_of_two(size),
        HEAD_SIZE=head_size,
        HEAD_BLOCK=power_of_two(head_size),
        KIND=NORM_KINDS[norm.kind],
        num_warps=num_warps_for(size, weight_VD.dtype),
    )
    return stream_TD, normed_TD, angles_TI
