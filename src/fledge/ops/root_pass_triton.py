"""Rows of newest tokens in one launch, with the requests' rows of the block tables.

Legend: B requests, R rows of the tables of all, P blocks of a table.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.table_rows_triton import copy_part, newest_token, parts

if TYPE_CHECKING:
    from fledge.ops.root_pass import Ends, RootRows


@triton.jit(do_not_specialize=["num_requests", "num_blocks", "row_stride", "last_position"])
def _root_kernel(
    place_rows_ptr,
    lens_ptr,
    fresh_ptr,
    newest_ptr,
    all_tables_ptr,
    tokens_ptr,
    positions_ptr,
    context_ptr,
    slots_ptr,
    table_ptr,
    num_requests,
    num_blocks,
    row_stride,
    last_position,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A part of a request's table; the first program of a request finds its row as well."""
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = copy_part(
        place_rows_ptr, all_tables_ptr, table_ptr, request, part, num_blocks, row_stride, COLUMNS
    )
    if part == 0:
        number = tl.load(lens_ptr + request) - 1
        block = tl.load(row_ptr + number // PAGE)
        token = newest_token(fresh_ptr, newest_ptr, request, num_requests)
        tl.store(tokens_ptr + request, token)
        tl.store(positions_ptr + request, tl.minimum(number, last_position))
        tl.store(context_ptr + request, number)
        tl.store(slots_ptr + request, block * PAGE + number % PAGE)


def find_roots(ends: "Ends", table_RP: Tensor, block_size: int, last_position: int) -> "RootRows":
    """The twin is the plain way of `make_root_pass`."""
    from fledge.ops.root_pass import RootRows

    num_requests, num_blocks = ends.lens_B.shape[0], table_RP.shape[1]
    # Lines of even lengths: kernels are compiled anew for memory that is aligned less.
    lines = ends.lens_B.new_empty(4, num_requests + num_requests % 2)[:, :num_requests]
    tokens_B, positions_B, context_B, slots_B = lines
    table_BP = ends.lens_B.new_empty(num_requests, num_blocks)
    found = RootRows(tokens_B, positions_B, context_B, slots_B, table_BP)
    grid, columns = parts(num_requests, table_RP)
    _root_kernel[grid](
        *ends,
        table_RP,
        *found,
        num_requests,
        num_blocks,
        table_RP.stride(0),
        last_position,
        PAGE=block_size,
        COLUMNS=columns,
    )
    return found
