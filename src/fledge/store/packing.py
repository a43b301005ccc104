"""Which samples go into which training sequence, so that little room is left over.

Best fit, the longest first: each sample goes where it leaves the least room. A sample is split only
when it is longer than a sequence. The same lengths give the same plan.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fledge.contracts.errors import ConfigError


class Piece(NamedTuple):
    """A part of a sample, usually all of it."""

    sample: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Sequences of at most `length` tokens."""

    length: int
    pieces: NDArray[np.int64]
    """[P, 3]: sample, start, stop; in the order of the sequences."""

    offsets: NDArray[np.int64]
    """[N+1]: sequence n is pieces[offsets[n] : offsets[n + 1]]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> list[Piece]:
        if not 0 <= number < len(self):
            raise IndexError(f"sequence {number} of {len(self)}")
        first, last = self.offsets[number : number + 2]
        return [Piece(*map(int, piece)) for piece in self.pieces[first:last]]

    def __iter__(self) -> Iterator[list[Piece]]:
        return (self[number] for number in range(len(self)))

    @property
    def num_tokens(self) -> int:
        return int((self.pieces[:, 2] - self.pieces[:, 1]).sum())

    @property
    def fill(self) -> float:
        """Share of all room that holds tokens."""
        return self.num_tokens / (len(self) * self.length) if len(self) else 0.0


def pack(lengths: Sequence[int] | NDArray[np.int64], length: int) -> PackingPlan:
    """Put samples of the given lengths into sequences of `length` tokens."""
    if length < 1:
        raise ConfigError(f"sequences of {length} tokens cannot hold anything; use 1 or more.")
    pieces = _split(lengths, length)
    sizes = pieces[:, 2] - pieces[:, 1]
    sequence_of = np.empty(len(pieces), np.int64)
    room = _OpenSequences()
    num_sequences = 0
    for index in np.argsort(-sizes, kind="stable"):
        size = int(sizes[index])
        found = room.take(size)
        if found is None:
            found = (num_sequences, length)
            num_sequences += 1
        sequence, free = found
        sequence_of[index] = sequence
        if free > size:
            room.give(sequence, free - size)
    order = np.argsort(sequence_of, kind="stable")
    counts = np.bincount(sequence_of, minlength=num_sequences)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return PackingPlan(length, pieces[order], offsets)


def _split(lengths: Sequence[int] | NDArray[np.int64], length: int) -> NDArray[np.int64]:
    rows = [
        (sample, start, min(start + length, int(size)))
        for sample, size in enumerate(lengths)
        for start in range(0, int(size), length)
    ]
    return np.array(rows, np.int64).reshape(-1, 3)


class _OpenSequences:
    """Sequences with room left, by how much; the newest first among equals."""

    def __init__(self) -> None:
        self._rooms: list[int] = []
        self._by_room: dict[int, list[int]] = {}

    def take(self, size: int) -> tuple[int, int] | None:
        """The sequence with the least room that is enough, and its room."""
        place = bisect_left(self._rooms, size)
        if place == len(self._rooms):
            return None
        room = self._rooms[place]
        waiting = self._by_room[room]
        sequence = waiting.pop()
        if not waiting:
            del self._by_room[room]
            del self._rooms[place]
        return sequence, room

    def give(self, sequence: int, room: int) -> None:
        if room not in self._by_room:
            self._rooms.insert(bisect_left(self._rooms, room), room)
        self._by_room.setdefault(room, []).append(sequence)
