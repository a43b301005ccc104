"""Writing and moving cache rows: one launch for all that a layer stores, one for a whole memory.

The twins are the indexed assignments of `KVPool`.

Legend: T new rows, S slots, G heads, D head size, B groups of moves, L moves of a group, C columns.
"""

from collections.abc import Sequence as Many

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.paged_shape import power_of_two

_COLUMNS = 1024
_TILE = 4096
"""Elements a program moves at once."""

_ELEMENTS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""What rows are moved as, by bytes: the widest that divides all of them."""


@triton.jit
def _write_row(
    row,
    slot,
    rows_ptr,
    pool_ptr,
    stride_t,
    stride_g,
    begin,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = begin + tl.arange(0, COLUMNS)
    # A row without a slot is stored nowhere.
    is_there = columns < tl.where(slot >= 0, WIDTH, 0)
    heads, dims = columns // SIZE, columns % SIZE
    values = tl.load(rows_ptr + row * stride_t + heads * stride_g + dims, mask=is_there)
    tl.store(pool_ptr + slot * WIDTH + columns, values, mask=is_there)


@triton.jit
def _write_kernel(
    slots_ptr,
    first_ptr,
    first_pool_ptr,
    second_ptr,
    second_pool_ptr,
    first_stride_t,
    first_stride_g,
    second_stride_t,
    second_stride_g,
    FIRST_WIDTH: tl.constexpr,
    FIRST_SIZE: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    SECOND_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    slot = tl.load(slots_ptr + row)
    _write_row(
        row, slot, first_ptr, first_pool_ptr, first_stride_t, first_stride_g, begin,
        FIRST_WIDTH, FIRST_SIZE, COLUMNS,
    )  # fmt: skip
    if SECOND_WIDTH > 0:
        _write_row(
            row, slot, second_ptr, second_pool_ptr, second_stride_t, second_stride_g, begin,
            SECOND_WIDTH, SECOND_SIZE, COLUMNS,
        )  # fmt: skip


def write_rows(pools: Many[Tensor], slots_T: Tensor, rows: Many[Tensor]) -> None:
    """Store one or two rows (keys and values, or anything else) of each new token at its slot."""
    assert 1 <= len(rows) <= 2
    fresh = [_by_heads(one) for one in rows]
    first, second = fresh[0], fresh[-1]
    widths = [one.shape[1] * one.shape[2] for one in fresh]
    columns = min(_COLUMNS, power_of_two(max(widths)))
    _write_kernel[(slots_T.shape[0], triton.cdiv(max(widths), columns))](
        slots_T,
        first,
        pools[0],
        second,
        pools[-1],
        *first.stride()[:2],
        *second.stride()[:2],
        FIRST_WIDTH=widths[0],
        FIRST_SIZE=first.shape[2],
        SECOND_WIDTH=widths[1] if len(rows) == 2 else 0,
        SECOND_SIZE=second.shape[2],
        COLUMNS=columns,
    )


def _by_heads(rows: Tensor) -> Tensor:
    """[T, G, D] whose last dimension is dense."""
    if rows.ndim != 3:
        rows = rows.flatten(1)[:, None]
    return rows if rows.stride(2) == 1 else rows.contiguous()


@triton.jit(do_not_specialize=["num_moves"])
def _move_kernel(
    addresses_ptr,
    widths_ptr,
    from_ptr,
    to_ptr,
    num_moves,
    ELEMENT: tl.constexpr,
    MOVES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """All moves of a group in a part of the columns: everything is read before anything is written.

    Columns are independent of each other, and so are groups.
    """
    pool, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width = tl.load(widths_ptr + pool)
    pool_ptr = tl.load(addresses_ptr + pool).to(tl.pointer_type(ELEMENT))
    moves, columns = tl.arange(0, MOVES), part * COLUMNS + tl.arange(0, COLUMNS)
    is_move = moves < num_moves
    from_L = tl.load(from_ptr + group * num_moves + moves, mask=is_move, other=0)
    to_L = tl.load(to_ptr + group * num_moves + moves, mask=is_move, other=0)
    # What stays where it is need not be touched.
    is_moved_LC = (is_move & (from_L != to_L))[:, None] & (columns < width)[None, :]
    from_ptrs = pool_ptr + from_L[:, None] * width + columns[None, :]
    rows_LC = tl.load(from_ptrs, mask=is_moved_LC, other=0)
    tl.debug_barrier()
    tl.store(pool_ptr + to_L[:, None] * width + columns[None, :], rows_LC, mask=is_moved_LC)


class RowMover:
    """Moves rows in several pools at once; made anew when a pool is added."""

    def __init__(self, pools: Many[Tensor]) -> None:
        sizes = [pool[0].numel() * pool.element_size() for pool in pools]
        self._element = next(size for size in _ELEMENTS if all(one % size == 0 for one in sizes))
        widths = [size // self._element for size in sizes]
        device = pools[0].device
        self._addresses = torch.tensor([pool.data_ptr() for pool in pools], device=device)
        self._widths = torch.tensor(widths, device=device)
        self._max_width = max(widths)

    def move(self, from_BL: Tensor, to_BL: Tensor) -> None:
        """Copy rows from slots to slots. Those of a group may overlap, groups may not."""
        num_groups, num_moves = from_BL.shape
        moves = power_of_two(num_moves)
        columns = max(1, min(_TILE // moves, power_of_two(self._max_width)))
        grid = (len(self._addresses), num_groups, triton.cdiv(self._max_width, columns))
        _move_kernel[grid](
            self._addresses,
            self._widths,
            from_BL.contiguous(),
            to_BL.contiguous(),
            num_moves,
            ELEMENT=_ELEMENTS[self._element],
            MOVES=moves,
            COLUMNS=columns,
        )
