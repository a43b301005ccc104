"""Counter-based randomness: a pure function of (seed, position, token), never a stream.

The uniform bits come from 64-bit integer arithmetic that wraps the same way on every device, so a
request draws the same noise on CPU and GPU, alone or in a batch, with or without drafts. The mixing
function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
"""

import torch
from torch import Tensor

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_MANTISSA_BITS = 52


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    value &= _MASK64
    return value - 2**64 if value >= 2**63 else value


def _shift_right(bits: Tensor, amount: int) -> Tensor:
    """Logical shift: torch's own shift of int64 copies the sign bit."""
    return (bits >> amount) & ((1 << (64 - amount)) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, _SHIFTS[0])) * _signed(_MULTIPLIERS[0])
    bits = (bits ^ _shift_right(bits, _SHIFTS[1])) * _signed(_MULTIPLIERS[1])
    return bits ^ _shift_right(bits, _SHIFTS[2])


def uniform_bits(seed_B: Tensor, position_B: Tensor, num_columns: int, stream: int = 0) -> Tensor:
    """64 random bits for each request and column (a token id, or a coin), int64 [B, columns]."""
    columns_C = torch.arange(num_columns, device=seed_B.device)
    return _bits_of(seed_B, position_B, columns_C, stream)


def _bits_of(seed_B: Tensor, position_B: Tensor, columns: Tensor, stream: int) -> Tensor:
    """The bits of given columns: the same for all requests, or [B, columns]."""
    golden = _signed(_GOLDEN)
    base_B = _mix(seed_B + _signed(_GOLDEN * (2 * stream + 1)))
    base_B = _mix(base_B + golden * (position_B + 1))
    return _mix(base_B[:, None] + golden * (columns + 1))


def uniform(seed_B: Tensor, position_B: Tensor, num_columns: int, stream: int = 0) -> Tensor:
    """Uniform numbers strictly between 0 and 1, float64 [B, columns]."""
    return _between_0_and_1(uniform_bits(seed_B, position_B, num_columns, stream))


def gumbel(seed_B: Tensor, position_B: Tensor, num_columns: int, stream: int = 0) -> Tensor:
    """Standard Gumbel noise, float64 [B, columns]: argmax(log p + noise) is a sample of p."""
    return -torch.log(-torch.log(uniform(seed_B, position_B, num_columns, stream)))


def gumbel_of(seed_B: Tensor, position_B: Tensor, columns_BK: Tensor, stream: int = 0) -> Tensor:
    """What `gumbel` has in these columns, float64 [B, K]."""
    bits_BK = _bits_of(seed_B, position_B, columns_BK, stream)
    return -torch.log(-torch.log(_between_0_and_1(bits_BK)))


def _between_0_and_1(bits: Tensor) -> Tensor:
    cells = _shift_right(bits, 64 - _MANTISSA_BITS)
    return (cells.double() + 0.5) * 2.0**-_MANTISSA_BITS
