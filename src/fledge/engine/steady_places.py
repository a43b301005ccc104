"""Who is in which place of the batch that runs ahead.

Requests come and go without the device being waited for: a place is cleared, or written, behind the
cycle in flight, in the order of the stream. When there are more requests than places, or far fewer,
all of them move to a batch of another size, on the device.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Many

import torch

from fledge.engine.sequence import Sequence
from fledge.engine.steady_batch import Filters, Place, SteadyBatch, filters_of
from fledge.engine.steady_flight import Member
from fledge.engine.steady_sizes import SizeChoice


class SteadyPlaces:
    """Members of a batch, and batches of all sizes that were ever needed."""

    def __init__(
        self, num_levels: int, size_for: SizeChoice, *, spare_row: int, device: torch.device
    ) -> None:
        self._num_levels, self._spare_row, self._device = num_levels, spare_row, device
        self._size_for = size_for
        self._batches: dict[int, SteadyBatch] = {}
        self._members: dict[Sequence, Member] = {}
        self._by_place: list[Member | None] = []
        self._filters: Filters | None = None
        self.batch: SteadyBatch | None = None
        self.num_moves = 0
        """Times that all requests went to a batch of another size."""

    @property
    def members(self) -> Iterable[Member]:
        return self._members.values()

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._members)

    @property
    def num_requests(self) -> int:
        return len(self._members)

    @property
    def filters(self) -> Filters:
        """What sampling has to do for those who are there."""
        if self._filters is None:
            self._filters = filters_of(self.sequences)
        return self._filters

    def by_place(self) -> list[Member | None]:
        return list(self._by_place)

    def holds(self, seq: Sequence) -> bool:
        return seq in self._members

    def begin(self, members: Many[Member], fresh: Many[Many[int]]) -> None:
        """Start with these, of whom the newest tokens are given; others are forgotten."""
        self.forget()
        self.batch = self.batch_of(self._size_for(len(members), 0))
        self.batch.fill(_places(members, fresh))
        self._enter(members, range(len(members)))

    def join(self, members: Many[Member], fresh: Many[Many[int]]) -> None:
        """Take these in too."""
        where = self._make_room(members)
        assert self.batch is not None
        self.batch.put(_places(members, fresh), where)

    def join_from(self, other: SteadyBatch, columns: Many[int], members: Many[Member]) -> None:
        """Take in requests whose newest tokens are on the device alone."""
        where = self._make_room(members)
        assert self.batch is not None
        self.batch.copy_from(other, columns, where)

    def _make_room(self, members: Many[Member]) -> list[int]:
        """Places for these, in a larger batch if need be."""
        assert self.batch is not None
        needed = len(self._members) + len(members)
        if needed > self.batch.size:
            self._move(self._size_for(needed, self.batch.size))
        free = [place for place, member in enumerate(self._by_place) if member is None]
        where = free[: len(members)]
        self._enter(members, where)
        return where

    def _enter(self, members: Many[Member], where: Many[int]) -> None:
        assert self.batch is not None
        self._by_place += [None] * (self.batch.size - len(self._by_place))
        for member, place in zip(members, where, strict=True):
            assert member.sequence not in self._members
            member.place = place
            self._by_place[place] = self._members[member.sequence] = member
        self._filters = None

    def shrink(self) -> None:
        """Go on in a smaller batch if all fit in."""
        assert self.batch is not None
        if not self._members:
            return
        if (size := self._size_for(len(self._members), self.batch.size)) < self.batch.size:
            self._move(size)

    def _move(self, size: int) -> None:
        assert self.batch is not None
        old, self.batch = self.batch, self.batch_of(size)
        alive = [member for member in self._by_place if member is not None]
        self.batch.take_over(old, [member.place for member in alive if member.place is not None])
        self._by_place, self._members = [], {}
        self._enter(alive, range(len(alive)))
        self.num_moves += 1

    def batch_of(self, size: int) -> SteadyBatch:
        """The memory of batches of a size, made when it is first needed."""
        if size not in self._batches:
            self._batches[size] = SteadyBatch(
                size, self._num_levels, spare_row=self._spare_row, device=self._device
            )
        return self._batches[size]

    def leave(self, members: Many[Member]) -> None:
        """Requests have ended, or must go another way; what is in flight of them is not taken."""
        left = []
        for member in members:
            member.has_left = True
            if member.place is not None:
                left.append(member.place)
                self._by_place[member.place] = None
                member.place = None
                del self._members[member.sequence]
        if left:
            assert self.batch is not None
            self.batch.clear(left)

    def stop_drafting(self) -> None:
        """Nobody who is here is drafted for any more, whatever comes."""
        for member in self.members:
            member.is_drafted = False
        if self.batch is not None:
            self.batch.is_drafted_line_B.zero_()

    def drop_gone(self) -> None:
        """Requests that were taken away since the last cycle leave their places."""
        self.leave([member for member in self.members if member.is_gone])

    def forget(self) -> None:
        """Nobody is here any more."""
        for member in self.members:
            member.has_left, member.place = True, None
        self._members, self._by_place, self._filters, self.batch = {}, [], None, None


def _places(members: Many[Member], fresh: Many[Many[int]]) -> list[Place]:
    return [
        Place(member.sequence, member.is_drafted, tokens)
        for member, tokens in zip(members, fresh, strict=True)
    ]
