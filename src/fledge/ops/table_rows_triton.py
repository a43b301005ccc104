"""What kernels that lay out a pass do alike: they copy rows of the block tables, part by part.

Legend: R rows of the tables of all, P blocks of a table.
"""

import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.paged_shape import power_of_two

_COLUMNS = 1024


def parts(num_requests: int, table_RP: Tensor) -> tuple[tuple[int, int], int]:
    """Programs for the parts of each request's row, and the columns of a part."""
    num_blocks = table_RP.shape[1]
    columns = min(_COLUMNS, power_of_two(num_blocks))
    return (num_requests, triton.cdiv(num_blocks, columns)), columns


@triton.jit
def copy_part(
    place_rows_ptr,
    all_tables_ptr,
    table_ptr,
    request,
    part,
    num_blocks,
    row_stride,
    COLUMNS: tl.constexpr,
):
    """Copies a part of a request's row to where the pass reads it; returns where the row begins."""
    row_ptr = all_tables_ptr + tl.load(place_rows_ptr + request) * row_stride
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    is_there = columns < num_blocks
    blocks = tl.load(row_ptr + columns, mask=is_there, other=0)
    tl.store(table_ptr + request * num_blocks + columns, blocks, mask=is_there)
    return row_ptr


@triton.jit
def newest_token(fresh_ptr, newest_ptr, request, num_requests):
    """The last of the tokens that a request has said last."""
    fresh = tl.load(fresh_ptr + request)
    return tl.load(newest_ptr + (fresh - 1) * num_requests + request)
