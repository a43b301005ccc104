"""Blocks are free or owned, never both, never lost, whatever the order of operations.

Catches: a block handed to two sequences (they would overwrite each other's keys), a block that
nobody gives back, slots that change when a table grows, and a pool that forgets blocks as it grows.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fledge.engine.blocks import BlockPool, SlotTable

CPU = torch.device("cpu")


class Tables(RuleBasedStateMachine):
    """Sequences come, grow and go; the model is a list of the slots each was ever given."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(block_size=3)
        self.tables: list[SlotTable] = []
        self.known: list[list[int]] = []

    @rule()
    def open(self) -> None:
        self.tables.append(SlotTable(self.pool, CPU))
        self.known.append([])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_slots=st.integers(0, 40))
    def reserve(self, data: st.DataObject, num_slots: int) -> None:
        i = data.draw(st.integers(0, len(self.tables) - 1))
        before = self.known[i]
        self.tables[i].reserve(num_slots)
        slots = self.tables[i].slots.tolist()
        assert len(slots) >= num_slots
        assert len(slots) <= max(len(before), num_slots + self.pool.block_size - 1)
        assert slots[: len(before)] == before, "slots that are in use moved"
        self.known[i] = slots

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.tables) - 1))
        self.tables[i].release()
        assert self.tables[i].slots.tolist() == []
        self.known[i] = []

    @invariant()
    def nobody_shares_and_nothing_is_lost(self) -> None:
        self.pool.check_integrity()
        slots = [slot for table in self.tables for slot in table.slots.tolist()]
        assert len(set(slots)) == len(slots)
        assert len(slots) == self.pool.num_owned * self.pool.block_size
        assert all(0 <= slot < self.pool.num_slots for slot in slots)

    def teardown(self) -> None:
        for table in self.tables:
            table.release()
        self.pool.check_integrity()
        assert self.pool.num_owned == 0


Tables.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestTables = Tables.TestCase


@given(st.lists(st.integers(0, 7), max_size=20), st.integers(1, 5))
def test_taking_gives_exactly_as_many_as_asked(counts: list[int], block_size: int) -> None:
    pool = BlockPool(block_size)
    taken: list[int] = []
    for count in counts:
        blocks = pool.take(count)
        assert len(blocks) == count
        taken += blocks
    assert len(set(taken)) == len(taken) == pool.num_owned
    assert pool.num_slots == pool.num_blocks * block_size
    pool.check_integrity()


def test_freed_blocks_are_used_before_the_pool_grows() -> None:
    pool = BlockPool(4)
    first = pool.take(4)
    pool.give_back(first[:2])
    size = pool.num_blocks
    pool.take(2)
    assert pool.num_blocks == size


def test_giving_back_what_nobody_owns_is_our_own_mistake() -> None:
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="nobody owned"):
        pool.give_back(blocks)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "free twice"),
        (lambda pool: pool._owned.add(pool._free[0]), "free and owned"),
        (lambda pool: pool._free.pop(), "lost"),
    ],
)
def test_check_integrity_can_fail(damage: object, message: str) -> None:
    pool = BlockPool(2)
    pool.give_back(pool.take(4))
    damage(pool)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


def test_slices_are_in_the_order_of_the_tokens() -> None:
    """Two sequences that grow in turn have interleaved blocks and unbroken slices."""
    pool = BlockPool(2)
    ours, theirs = SlotTable(pool, CPU), SlotTable(pool, CPU)
    for num_slots in (2, 4, 6):
        ours.reserve(num_slots)
        theirs.reserve(num_slots)
    assert ours.slice(1, 5).tolist() == ours.slots[1:5].tolist()
    assert not set(ours.slots.tolist()) & set(theirs.slots.tolist())
