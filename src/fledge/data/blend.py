"""Which rows of which source go into the blend, and in which order.

A row is chosen by a hash of the seed and its id: those with the smallest hashes are in, whatever
else is in the source. Memory does not grow with the rows: a histogram of the hashes finds the range
in which the last chosen one lies, and only hashes of that range are held.
"""

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import xxhash

from fledge.contracts.data_settings import PrepareSettings
from fledge.contracts.errors import ArtifactError
from fledge.store.rows import id_field, row_files

_HASH_BITS = 128
_BUCKET_BITS = 16


def count_blend(settings: PrepareSettings, num_kept: Sequence[int]) -> list[int]:
    """Rows that each source gives, by its cap, and by its weight when a total is set."""
    available = [
        min(rows, source.max_rows) if source.max_rows else rows
        for rows, source in zip(num_kept, settings.sources, strict=True)
    ]
    if not settings.rows:
        return available
    return share_rows(available, [source.weight for source in settings.sources], settings.rows)


def share_rows(available: Sequence[int], weights: Sequence[float], total: int) -> list[int]:
    """Rows that each source gives to a blend of `total` rows, in proportion to the weights.

    What a source cannot give is shared by the others, again in proportion. A source of weight 0
    gives nothing. The sum is `total`, or all there is.
    """
    shares = [0] * len(available)
    open_ids = [i for i, weight in enumerate(weights) if weight > 0 and available[i] > 0]
    left = min(total, sum(available[i] for i in open_ids))
    while open_ids:
        scale = left / sum(weights[i] for i in open_ids)
        emptied = [i for i in open_ids if available[i] <= weights[i] * scale]
        if not emptied:
            break
        for i in emptied:
            shares[i] = available[i]
            left -= available[i]
        open_ids = [i for i in open_ids if i not in emptied]
    return _round(shares, open_ids, weights, left)


def _round(
    shares: list[int], open_ids: list[int], weights: Sequence[float], left: int
) -> list[int]:
    """Whole numbers by largest remainder; equal remainders go to the earlier source."""
    if not open_ids:
        return shares
    scale = left / sum(weights[i] for i in open_ids)
    for i in open_ids:
        shares[i] = int(weights[i] * scale)
    missing = left - sum(shares[i] for i in open_ids)
    by_remainder = sorted(open_ids, key=lambda i: shares[i] - weights[i] * scale)
    for i in by_remainder[:missing]:
        shares[i] += 1
    return shares


def choose_lines(directory: Path, num_rows: int, num_chosen: int, seed: int) -> Iterator[bytes]:
    """The lines of `num_chosen` of the directory's `num_rows` rows, in their order."""
    if num_chosen >= num_rows:
        yield from _lines(directory)
    elif num_chosen:
        last = _last_chosen(directory, num_chosen, seed)
        yield from (line for line in _lines(directory) if row_hash(line, seed) <= last)


def row_hash(line: bytes, seed: int) -> int:
    """A number of 128 bits that only the seed and the row's id decide."""
    return xxhash.xxh3_128_intdigest(b"%d:%b" % (seed, id_field(line)))


def interleave(sources: Sequence[tuple[int, Iterable[bytes]]]) -> Iterator[bytes]:
    """The lines of all sources, each spread evenly over the whole; a source is (rows, lines)."""
    heap = [(0.5 / count, i, 0) for i, (count, _) in enumerate(sources) if count]
    iterators = [iter(lines) for _, lines in sources]
    heapq.heapify(heap)
    while heap:
        _, i, place = heap[0]
        line = next(iterators[i], None)
        if line is None:
            raise ArtifactError(
                f"source {i} has {place} rows on disk where {sources[i][0]} were counted; remove "
                "the output directory and start again."
            )
        yield line
        count = sources[i][0]
        if place + 1 < count:
            heapq.heapreplace(heap, ((place + 1.5) / count, i, place + 1))
        else:
            heapq.heappop(heap)


def _last_chosen(directory: Path, num_chosen: int, seed: int) -> int:
    """The largest hash among the `num_chosen` smallest."""
    shift = _HASH_BITS - _BUCKET_BITS
    histogram = array("q", bytes(8 << _BUCKET_BITS))
    for line in _lines(directory):
        histogram[row_hash(line, seed) >> shift] += 1
    before = bucket = 0
    while before + histogram[bucket] < num_chosen:
        before += histogram[bucket]
        bucket += 1
    hashes = (row_hash(line, seed) for line in _lines(directory))
    inside = sorted(value for value in hashes if value >> shift == bucket)
    return inside[num_chosen - before - 1]


def _lines(directory: Path) -> Iterator[bytes]:
    for path in row_files(directory):
        with path.open("rb") as file:
            yield from file
