"""Codes in whole bytes: nothing is lost, nothing wasted, and the layout is the documented one."""

import numpy as np
import pytest
import torch

from fledge.ops import bit_planes


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
@pytest.mark.parametrize("num_values", [8, 32, 1728])
def test_codes_come_back(bits: int, num_values: int) -> None:
    chance = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (7, num_values), generator=chance, dtype=torch.uint8)
    packed = bit_planes.pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (7, bit_planes.packed_bytes(num_values, bits))
    assert packed.shape[1] * 8 == num_values * bits
    assert torch.equal(bit_planes.unpack(packed, bits, num_values), codes)


def test_no_rows() -> None:
    packed = bit_planes.pack(torch.zeros(0, 32, dtype=torch.uint8), 5)
    assert packed.shape == (0, 20)
    assert bit_planes.unpack(packed, 5, 32).shape == (0, 32)


def test_the_layout_is_the_documented_one() -> None:
    """Five bits: first the low nibbles, the two halves of the row in one byte; then the top bits,
    the eight eighths of the row in one byte.
    """
    codes = np.random.default_rng(0).integers(0, 32, 64, dtype=np.uint8)
    packed = bit_planes.pack(torch.from_numpy(codes)[None], 5)[0].numpy()
    for j in range(32):
        assert packed[j] == (codes[j] & 15) | (codes[32 + j] & 15) << 4
    for j in range(8):
        assert packed[32 + j] == sum(int(codes[8 * k + j] >> 4) << k for k in range(8))


def test_the_upper_plane_of_six_bits() -> None:
    codes = np.random.default_rng(0).integers(0, 64, 32, dtype=np.uint8)
    packed = bit_planes.pack(torch.from_numpy(codes)[None], 6)[0].numpy()
    for j in range(8):
        assert packed[16 + j] == sum(int(codes[8 * k + j] >> 4) << 2 * k for k in range(4))
