"""How paged attention cuts its work into programs, from what the host knows without asking.

Only counts of rows and requests go in, never lengths: a captured pass keeps its shape whatever the
lengths become.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from fledge.ops.paged_rows import FrontierRows, PagedRows

SEGMENTS_OF_A_LENGTH = 64
"""From the first number on; behind them, segments are twice as long each time numbers double."""

_MOST_SPLITS = 32
_MOST_SPLITS_OF_SMALL = 64
_LONG_PARTS = 48
"""Where a request may have more, for 12k tokens, a kernel of its own joins them. It takes its turn
behind short contexts as well, for nothing."""

_SEGMENT = 256
"""Keys of a segment: programs that share a tile have some of its segments each. How long they are
decides the last bits of sums, so that it must not depend on a pass."""

_MOST_PART_BYTES = 3 << 27
"""For what programs of split tiles leave for each other: 250 rows of an 8B shape that may have 33k
tokens each. Passes with more are not split."""

_NO_MORE = 1 << 30
"""Tiles to the next of a program that has only one."""


@dataclass(frozen=True, slots=True)
class PagedShape:
    tile: int
    """Rows times query heads of a program, a power of two."""

    keys: int
    """Keys of a step."""

    num_warps: int
    num_stages: int
    registers: int | None
    """Of a thread at most, where the compiler would take so many that few programs fit."""

    num_tiles: int
    """Enough for every row; how many each request needs is found on the device."""

    tiles_each: int
    """Tiles from one to the next of the same program: all of a request that others do not have."""

    is_located: bool
    """Whether tiles are counted through all requests, or each request has `tiles_each` of them."""

    num_splits: int
    """Programs that may share the keys of a tile."""

    segment: int
    """Keys that are summed by themselves."""

    num_parts: int
    """Segments of a request at most."""

    is_parted: bool
    """Whether keys that every row sees have a loop of their own."""

    joins: bool
    """Whether the last program of a tile joins its parts, or another kernel does."""

    @property
    def options(self) -> dict[str, int]:
        """What the compiler is told."""
        told = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return told if self.registers is None else {**told, "maxnreg": self.registers}


def num_segments(num_keys: int, segment: int) -> int:
    """How many so many keys need; the first ones are `segment` long."""
    start, count, limit = 0, 0, SEGMENTS_OF_A_LENGTH * segment
    while num_keys > limit:
        count += (limit - start) // segment
        start, segment, limit = limit, 2 * segment, 2 * limit
    return count - (start - num_keys) // segment


def power_of_two(count: int) -> int:
    """The smallest that is not below."""
    return 1 << (count - 1).bit_length()


def block_of(size: int) -> int:
    """Columns of a tile for rows of this size: tensor cores take powers of two from 16 on."""
    return max(16, power_of_two(size))


def requests_at_once(count: int) -> int:
    """How many places kernels look at to find the request of a tile; few sizes, few kernels."""
    return 32 if count <= 32 else max(256, power_of_two(count))


class _Device(NamedTuple):
    num_processors: int
    shared_bytes: int
    has_registers: bool
    """Whether a kernel may be told how many of them to use."""


@cache
def _device(device: torch.device) -> _Device:
    if device.type != "cuda":
        return _Device(8, 228 * 1024, has_registers=False)
    found = torch.cuda.get_device_properties(device)
    # What a kernel may ask for; only NVIDIA devices have more than a block gets without asking.
    shared_bytes = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return _Device(
        found.multi_processor_count, int(shared_bytes), has_registers=torch.version.hip is None
    )


def paged_shape(
    rows: PagedRows, *, group: int, num_groups: int, head_size: int, dtype: torch.dtype
) -> PagedShape:
    """`group` query heads share each of `num_groups` key heads."""
    device = _device(rows.context_B.device)
    is_wide, is_float = head_size > 128, dtype == torch.float32
    # Graphics cards have less than half the memory on a processor that data centre cards have.
    is_small = device.shared_bytes < 160 * 1024
    largest = 128 >> (is_wide + 2 * is_float + is_small)
    tile = power_of_two(-(-rows.num_rows // rows.num_requests) * group)
    tile = max(16, power_of_two(group), min(tile, largest))
    num_tiles, tiles_each, is_located = _tiles(rows, tile // group)
    capacity = rows.table_BP.shape[1] * rows.block_size
    num_parts = num_segments(capacity, _SEGMENT)
    is_long = num_parts > _LONG_PARTS
    part_bytes = 4 * rows.num_rows * group * num_groups * num_parts * head_size
    num_splits = min(_most_splits(device, tile, num_tiles * num_groups, is_long), num_parts)
    if part_bytes > _MOST_PART_BYTES:
        num_splits = 1
    # Programs that join parts hold more, and are not so many that they need be small.
    is_lean = (tile < 64 and num_splits <= 1) or (tile == 16 and is_long)
    return PagedShape(
        tile=tile,
        # The same for tiles of all sizes: it decides the last bits of sums.
        keys=max(16, 32 >> (is_wide + is_float + is_small)),
        num_warps=8 if tile >= 128 else 4,
        num_stages=2 if is_float or is_wide or is_small else 3,
        registers=128 if is_lean and not (is_wide or is_float) and device.has_registers else None,
        num_tiles=num_tiles,
        tiles_each=tiles_each,
        is_located=is_located,
        num_splits=max(1, num_splits),
        segment=_SEGMENT,
        num_parts=num_parts,
        is_parted=tile >= 64 or (is_long and num_splits > 1),
        joins=not is_long,
    )


def _most_splits(device: _Device, tile: int, num_tiles: int, is_long: bool) -> int:
    """Programs for each of so many tiles that fill the device."""
    # Small tiles need little room, so that several fit on a processor at once. More than two would
    # be faster only if all had keys: a program without any still takes its turn.
    num_splits = min(device.num_processors * (1 if tile >= 64 else 2) // num_tiles, _MOST_SPLITS)
    if not is_long or num_splits <= 1 or tile >= 64:
        return num_splits
    most = _MOST_SPLITS_OF_SMALL if tile == 16 else _MOST_SPLITS
    return min(device.num_processors * 4 // num_tiles, most)


def _tiles(rows: PagedRows, rows_each: int) -> tuple[int, int, bool]:
    """How many programs, how far apart those tiles of a request are that one of them has."""
    if isinstance(rows.rows, FrontierRows):
        tiles_each = -(-rows.rows.width // rows_each)
    elif rows.is_short:
        tiles_each = -(-rows.num_rows // (rows.num_requests * rows_each))
    else:
        num_tiles = rows.num_rows // rows_each + rows.num_requests
        return num_tiles, _NO_MORE, True
    return rows.num_requests * tiles_each, tiles_each, False
