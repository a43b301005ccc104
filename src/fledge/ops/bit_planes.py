"""Small whole numbers in whole bytes: planes of four bits, and of what is above them.

    bits   planes          bytes a row of N values
    8      8               N
    6      4, then 2       N/2 + N/4
    5      4, then 1       N/2 + N/8
    4      4               N/2

A plane of b bits cuts its row into 8/b equal runs: byte j holds value j of the first run in its
lowest bits, value j of the second run above it, and so on. The low plane comes first.

Legend: T rows, N values of a row, B bytes of a row.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,)}
"""Bits of each plane, the lowest bits of a value first."""

VALUES_MULTIPLE = 8
"""Rows have a multiple of so many values, so that every plane ends with a whole byte."""


def packed_bytes(num_values: int, bits: int) -> int:
    """Bytes that a row of so many values takes."""
    assert num_values % VALUES_MULTIPLE == 0
    return num_values * bits // 8


def pack(codes_TN: Tensor, bits: int) -> Tensor:
    """uint8 values below 2**bits -> uint8 [T, B]."""
    planes = []
    below = 0
    for plane_bits in PLANES[bits]:
        planes.append(_pack_plane(codes_TN >> below if below else codes_TN, plane_bits))
        below += plane_bits
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=1)


def unpack(bytes_TB: Tensor, bits: int, num_values: int) -> Tensor:
    """The values that `pack` was given, uint8 [T, N]."""
    widths = [num_values * plane_bits // 8 for plane_bits in PLANES[bits]]
    assert bytes_TB.shape[1] == sum(widths)
    codes_TN: Tensor | None = None
    below = 0
    for plane_bits, plane_TB in zip(PLANES[bits], _columns(bytes_TB, widths), strict=True):
        values_TN = _unpack_plane(plane_TB, plane_bits)
        codes_TN = values_TN if codes_TN is None else codes_TN | (values_TN << below)
        below += plane_bits
    assert codes_TN is not None
    return codes_TN


def _pack_plane(codes_TN: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes_TN
    num_runs = 8 // bits
    num_rows, num_values = codes_TN.shape
    runs = (codes_TN & (2**bits - 1)).view(num_rows, num_runs, num_values // num_runs)
    # The runs use different bits, so that their sum is their union.
    shifted: Tensor = runs << _shifts(num_runs, bits, codes_TN.device)
    return shifted.sum(dim=1, dtype=torch.uint8)


def _unpack_plane(plane_TB: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return plane_TB
    num_runs = 8 // bits
    runs: Tensor = plane_TB[:, None, :] >> _shifts(num_runs, bits, plane_TB.device)
    values: Tensor = runs & (2**bits - 1)
    return values.flatten(start_dim=1)


def _columns(bytes_TB: Tensor, widths: list[int]) -> Iterator[Tensor]:
    start = 0
    for width in widths:
        yield bytes_TB[:, start : start + width]
        start += width


def _shifts(num_runs: int, bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, num_runs * bits, bits, dtype=torch.uint8, device=device)[:, None]
