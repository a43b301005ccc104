"""MinHash: the similarity of two texts from two short signatures, and keys to find the pair by.

A text is the set of its word 5-grams, with blanks before and after, so that a changed word costs
five of them wherever it stands. A signature keeps 2 bits of each of 256 minima, 64 bytes; the share
of equal pairs estimates the Jaccard similarity of the sets (b-bit minwise hashing). For finding
candidates, some minima are taken together in bands; two texts meet when one band is equal.

Everything here is part of the file format of `duplicates.py`: constants never change.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

SHINGLE_WORDS = 5
MIN_WORDS = 20
"""Shorter texts are too easily alike: in them one word is the whole difference."""

_NUM_MINIMA = 256
_MINIMUM_BYTES = 4
_PLANE_MASK = (1 << _NUM_MINIMA) - 1
_CHANCE = 0.25
"""How often 2 bits of different minima are equal."""

_RECALL = 0.98
_WANTED_BANDS = 10
_MAX_BAND_SIZE = 16
_KEY_BITS = 48
_CHUNK_SHINGLES = 2048
_BLANKS = bytes(8 * (SHINGLE_WORDS - 1))
_MEMO_WORDS = 200_000
_HALF_WORD = np.uint64(32)


class BandShape(NamedTuple):
    """How minima are taken together."""

    num_bands: int
    band_size: int


def choose_bands(threshold: float) -> BandShape:
    """The largest bands that still find 98% of the pairs at the threshold.

    Larger bands meet fewer strangers but need to be more. At least two minima go together, else
    every common phrase would make a candidate.
    """
    best = BandShape(_bands_needed(threshold, 2), 2)
    for size in range(3, _MAX_BAND_SIZE + 1):
        needed = _bands_needed(threshold, size)
        if needed <= _WANTED_BANDS:
            best = BandShape(needed, size)
    return best


def _bands_needed(threshold: float, size: int) -> int:
    missed = 1 - threshold**size
    return 1 if missed <= 0 else math.ceil(math.log(1 - _RECALL) / math.log(missed))


def _constants(count: int) -> list[int]:
    """64-bit numbers without a pattern, the same forever (splitmix64)."""
    numbers = []
    for i in range(1, count + 1):
        z = i * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        numbers.append(z ^ z >> 31)
    return numbers


class _WordHashes(dict[str, bytes]):
    """Stable 64-bit hashes of words; common words are hashed once."""

    def __missing__(self, word: str) -> bytes:
        value = xxhash.xxh3_64_digest(word.encode("utf-8", "surrogatepass"))
        if len(self) < _MEMO_WORDS:
            self[word] = value
        return value


class MinHasher:
    """Makes signatures and band keys for one threshold."""

    def __init__(self, threshold: float) -> None:
        self.shape = choose_bands(threshold)
        numbers = np.array(_constants(2 * _NUM_MINIMA + SHINGLE_WORDS), dtype=np.uint64)
        halves = (numbers >> _HALF_WORD).astype(np.uint32)
        self._multipliers = halves[:_NUM_MINIMA] | np.uint32(1)
        self._offsets = halves[_NUM_MINIMA : 2 * _NUM_MINIMA]
        self._weights = numbers[2 * _NUM_MINIMA :] | np.uint64(1)
        self._hashes = _WordHashes()

    def minima(self, words: Sequence[str]) -> NDArray[np.uint32]:
        """The smallest hash of any 5-gram under each of 256 hash functions."""
        shingles = self._shingles(words)
        smallest = np.full(_NUM_MINIMA, 0xFFFFFFFF, dtype=np.uint32)
        for start in range(0, len(shingles), _CHUNK_SHINGLES):
            part = shingles[start : start + _CHUNK_SHINGLES, None]
            hashed = (part * self._multipliers + self._offsets).min(axis=0)
            np.minimum(smallest, hashed, out=smallest)
        return smallest

    def keys(self, minima: NDArray[np.uint32], family: int) -> list[int]:
        """One key per band; texts of different families never share one."""
        num_bands, size = self.shape
        raw = minima[: num_bands * size].astype("<u4").tobytes()
        step = size * _MINIMUM_BYTES
        return [
            xxhash.xxh3_64_intdigest(raw[band * step : (band + 1) * step], (family + band) % 2**64)
            >> (64 - _KEY_BITS)
            for band in range(num_bands)
        ]

    def _shingles(self, words: Sequence[str]) -> NDArray[np.uint32]:
        """32-bit hashes of all word 5-grams, blanks before and after included."""
        hashes = self._hashes
        raw = b"".join([_BLANKS, *[hashes[word] for word in words], _BLANKS])
        padded = np.frombuffer(raw, dtype=">u8").astype(np.uint64)
        # Sums of products modulo 2**64: words are hashed well, so the high half needs no mixing.
        sums = np.correlate(padded, self._weights, "valid")
        return (sums >> _HALF_WORD).astype(np.uint32)


def pack(minima: NDArray[np.uint32]) -> bytes:
    """A signature: 2 bits of every minimum, all first bits and then all second bits."""
    # Small minima have no high bits and near ones share low bits: mix before taking two.
    bits = (minima * np.uint32(0x9E3779B1)) >> np.uint32(30)
    return np.packbits(bits & 1).tobytes() + np.packbits(bits >> 1).tobytes()


def similarity(signature: bytes, other: bytes) -> float:
    """Estimated Jaccard similarity of the texts of two signatures, from 0 to 1."""
    different = int.from_bytes(signature, "little") ^ int.from_bytes(other, "little")
    different = (different | different >> _NUM_MINIMA) & _PLANE_MASK
    equal = 1 - different.bit_count() / _NUM_MINIMA
    return max(0.0, (equal - _CHANCE) / (1 - _CHANCE))
