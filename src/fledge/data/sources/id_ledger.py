"""How many of the ids that rows brought along occurred before, in memory that does not grow.

Ids are kept as 64-bit hashes, 8 bytes each: a buffer in memory, and sorted runs in an unnamed
temporary file once there are more. Two different ids of 100 million share a hash with a chance of
three in ten thousand, so the count may be read as exact.
"""

import tempfile
import weakref
from array import array
from typing import IO

import numpy as np
import xxhash

_BUFFER_IDS = 1 << 20
_SLICES = 64
"""Runs are compared in this many ranges of hashes, so that only such a part is in memory."""

_HASH_BYTES = 8


class IdLedger:
    """Counts repeated ids."""

    def __init__(self, buffer_ids: int = _BUFFER_IDS) -> None:
        self._buffer_ids = buffer_ids
        self._buffer = array("Q")
        self._spilled: IO[bytes] | None = None
        self._run_lens: list[int] = []
        self._counted: tuple[int, int] = (0, 0)
        self._num_ids = 0

    def add(self, row_id: str) -> None:
        self._num_ids += 1
        self._buffer.append(xxhash.xxh3_64_intdigest(row_id.encode("utf-8", "surrogatepass")))
        if len(self._buffer) >= self._buffer_ids:
            self._spill()

    def count_repeats(self) -> int:
        """Ids given minus different ids given."""
        known_ids, repeats = self._counted
        if known_ids != self._num_ids:
            repeats = self._num_ids - self._count_distinct()
            self._counted = (self._num_ids, repeats)
        return repeats

    def _spill(self) -> None:
        if self._spilled is None:
            self._spilled = tempfile.TemporaryFile()  # noqa: SIM115
            weakref.finalize(self, self._spilled.close)
        self._spilled.write(np.sort(np.array(self._buffer, dtype=np.uint64)).tobytes())
        self._run_lens.append(len(self._buffer))
        self._buffer = array("Q")

    def _count_distinct(self) -> int:
        runs = [np.sort(np.array(self._buffer, dtype=np.uint64)), *self._runs_on_disk()]
        bounds = np.arange(1, _SLICES, dtype=np.uint64) * np.uint64(2**64 // _SLICES)
        cuts = [[0, *np.searchsorted(run, bounds).tolist(), len(run)] for run in runs]
        distinct = 0
        for i in range(_SLICES):
            parts = [run[cut[i] : cut[i + 1]] for run, cut in zip(runs, cuts, strict=True)]
            distinct += len(np.unique(np.concatenate(parts)))
        return distinct

    def _runs_on_disk(self) -> list[np.ndarray]:
        if self._spilled is None:
            return []
        self._spilled.flush()
        starts = np.cumsum([0, *self._run_lens[:-1]]).tolist()
        return [
            np.memmap(self._spilled, np.uint64, "r", offset=start * _HASH_BYTES, shape=(run_len,))
            for start, run_len in zip(starts, self._run_lens, strict=True)
        ]
