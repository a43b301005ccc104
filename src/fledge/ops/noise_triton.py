"""The noise of `ops/noise.py` inside kernels, for stream 0.

Legend: C columns.
"""

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(bits):
    """The finaliser of SplitMix64."""
    bits = (bits ^ (bits >> 30)) * _FIRST_MULTIPLIER
    bits = (bits ^ (bits >> 27)) * _SECOND_MULTIPLIER
    return bits ^ (bits >> 31)


@triton.jit
def noise_base(seed, position):
    """Mixed seed and output position."""
    base = _mix(seed.to(tl.uint64) + _GOLDEN)
    return _mix(base + _GOLDEN * (position + 1).to(tl.uint64))


@triton.jit
def gumbel_at(base, columns_C):
    """What `noise.gumbel` has in these columns; `base` holds seed and position."""
    bits_C = _mix(base + _GOLDEN * (columns_C + 1).to(tl.uint64))
    uniform_C = ((bits_C >> 12).to(tl.float64) + 0.5) * (2.0**-52)
    return -tl.log(-tl.log(uniform_C))
