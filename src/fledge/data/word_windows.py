"""Which windows of a given weight in a list of words are among those watched for.

A word weighs 2 and a character of a script without spaces 1. The window that begins at a word ends
where the weight is reached, so the same words have the same windows wherever they stand.
The hash of a window is a polynomial modulo 2**64 over the hashes of its words.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from fledge.data.prompt_text import is_unspaced

WORD_WEIGHT = 2
_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 2**64)
_STRANGER = bytes(8)
"""Hash of words that are not in the vocabulary: windows with one are like no window watched for."""

_MIN_TABLE_BITS = 16
_MAX_TABLE_BITS = 26
_CELLS_PER_HASH = 64


def weigh(words: Iterable[str]) -> int:
    """Two for a word, one for a character that stands for itself."""
    return sum(1 if is_unspaced(word) else WORD_WEIGHT for word in words)


class WordWindows:
    """Windows that weigh as much as `num_words` words, over words of one vocabulary."""

    def __init__(self, vocabulary: Iterable[str], num_words: int) -> None:
        self._num_words = num_words
        self._hashes = {
            word: xxhash.xxh3_64_digest(word.encode("utf-8", "surrogatepass"))
            for word in vocabulary
        }
        self._unspaced = frozenset(filter(is_unspaced, self._hashes))
        self._powers = _powers(_FACTOR, 1024)
        self._inverses = _powers(_INVERSE, 1024)
        self._shift = np.uint64(64 - _MIN_TABLE_BITS)
        self._table = np.zeros(1 << _MIN_TABLE_BITS, dtype=np.bool_)

    def watch(self, hashes: Sequence[int]) -> None:
        """Remember the windows that `find` is to look for."""
        wanted = (len(hashes) * _CELLS_PER_HASH).bit_length()
        bits = min(max(wanted, _MIN_TABLE_BITS), _MAX_TABLE_BITS)
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, dtype=np.bool_)
        self._table[np.array(hashes, dtype=np.uint64) >> self._shift] = True

    def find(self, words: Sequence[str]) -> list[tuple[int, int]]:
        """Hash and start of windows that are probably watched for; the caller knows surely."""
        hashes = self.hashes(words)
        is_found = self._table[hashes >> self._shift]
        if not is_found.any():
            return []
        found = is_found.nonzero()[0]
        return list(zip(hashes[found].tolist(), found.tolist(), strict=True))

    def hashes(self, words: Sequence[str]) -> NDArray[np.uint64]:
        """The hash of the window that begins at each word, as far as there are whole windows."""
        if len(words) < self._num_words:
            return np.zeros(0, dtype=np.uint64)
        known = self._hashes
        raw = b"".join([known.get(word, _STRANGER) for word in words])
        values = np.frombuffer(raw, dtype=np.uint64)
        if self._unspaced.isdisjoint(words):
            return np.correlate(values, self._powers[: self._num_words], "valid")
        return self._uneven_hashes(values, self._ends(words))

    def _uneven_hashes(
        self, values: NDArray[np.uint64], ends: NDArray[np.intp]
    ) -> NDArray[np.uint64]:
        """Sums over the whole text are taken once; each window is a difference of two."""
        if len(values) > len(self._powers):
            self._powers = _powers(_FACTOR, 2 * len(values))
            self._inverses = _powers(_INVERSE, 2 * len(values))
        sums = np.zeros(len(values) + 1, dtype=np.uint64)
        np.cumsum(values * self._powers[: len(values)], out=sums[1:])
        return (sums[ends] - sums[: len(ends)]) * self._inverses[: len(ends)]

    def end(self, words: Sequence[str], start: int) -> int:
        """Where the window that begins at a word ends."""
        return int(self._ends(words[start : start + WORD_WEIGHT * self._num_words])[0]) + start

    def _ends(self, words: Sequence[str]) -> NDArray[np.intp]:
        weights = [1 if word in self._unspaced else WORD_WEIGHT for word in words]
        reached = np.cumsum([0, *weights])
        ends = np.searchsorted(reached, reached[:-1] + WORD_WEIGHT * self._num_words)
        return ends[ends <= len(words)]


def _powers(factor: int, count: int) -> NDArray[np.uint64]:
    powers = np.full(count, factor, dtype=np.uint64)
    powers[0] = 1
    return np.cumprod(powers)
