"""How paged attention cuts its work into programs, from what the host knows without asking.

Only counts of rows and requests go in, never lengths: a captured pass keeps its shape whatever the
lengths become.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from fledge.ops.paged_rows import FrontierRows, PagedRows

_MOST_SPLITS = 64
FEWEST_KEYS = 128
"""Keys of a split: fewer are not worth a program."""


@dataclass(frozen=True, slots=True)
class PagedShape:
    tile: int
    """Rows times query heads of a program, a power of two."""

    keys: int
    """Keys of a step."""

    num_warps: int
    num_stages: int
    num_tiles: int
    """Enough for every row; how many each request needs is found on the device."""

    num_splits: int
    """Programs that share the keys of a tile."""


def power_of_two(count: int) -> int:
    """The smallest that is not below."""
    return 1 << (count - 1).bit_length()


class _Device(NamedTuple):
    num_processors: int
    shared_bytes: int


@cache
def _device(device: torch.device) -> _Device:
    if device.type != "cuda":
        return _Device(8, 228 * 1024)
    found = torch.cuda.get_device_properties(device)
    # What a kernel may ask for; only NVIDIA devices have more than a block gets without asking.
    shared_bytes = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return _Device(found.multi_processor_count, int(shared_bytes))


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
    rows_each = tile // group
    if isinstance(rows.rows, FrontierRows):
        num_tiles = rows.num_requests * -(-rows.rows.width // rows_each)
    else:
        num_tiles = rows.num_rows // rows_each + rows.num_requests
    # Small tiles need little room, so that several fit on a processor at once.
    wanted = device.num_processors * (1 if tile >= 64 else 2)
    capacity = rows.table_BP.shape[1] * rows.block_size
    num_splits = min(wanted // (num_tiles * num_groups), -(-capacity // FEWEST_KEYS), _MOST_SPLITS)
    return PagedShape(
        tile=tile,
        keys=max(16, 64 >> (is_wide + is_float + is_small)),
        num_warps=8 if tile >= 128 else 4,
        num_stages=2 if is_float or is_wide or is_small else 3,
        num_tiles=num_tiles,
        num_splits=max(1, num_splits),
    )
