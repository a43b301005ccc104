"""How many bytes the formats of features take: arithmetic that a plan needs before anything runs.

`ops/feature_codec` says what the bytes are, and `docs/reference/features.md` how to read them.
"""

import math

from fledge.contracts.capture_settings import FeatureFormat

FORMAT_BITS: dict[FeatureFormat, int] = {"q8": 8, "q6": 6, "q5": 5, "q4": 4}
"""Bits a value, beside the scales; `exact` has those of the target's dtype."""

FORMATS: tuple[FeatureFormat, ...] = ("exact", "q8", "q6", "q5", "q4")
MAX_BLOCK = 128
MIN_BLOCK = 32
SCALE_BYTES = 2
"""One float16 a block."""


def block_size(hidden_size: int) -> int:
    """The largest power of two from 32 to 128 that divides the hidden size, else 32."""
    return max(MIN_BLOCK, math.gcd(hidden_size, MAX_BLOCK))


def padded_size(hidden_size: int) -> int:
    """The hidden size in whole blocks."""
    block = block_size(hidden_size)
    return -(-hidden_size // block) * block


def row_bytes(name: FeatureFormat, *, hidden_size: int, num_taps: int, itemsize: int) -> int:
    """Bytes of `num_taps` hidden states side by side; `itemsize` is that of the target's dtype."""
    if name == "exact":
        return num_taps * hidden_size * itemsize
    size = padded_size(hidden_size)
    return num_taps * (
        size * FORMAT_BITS[name] // 8 + size // block_size(hidden_size) * SCALE_BYTES
    )
