"""Who owns which cache slot: blocks of slots, handed out and taken back.

This is bookkeeping on the host; the memory itself is a `KVPool`. A sequence sees its blocks as one
list of slots in the order of its tokens, so nothing outside knows that blocks exist.
"""

import torch
from torch import Tensor


class BlockPool:
    """Free and owned blocks. It grows by doubling; nothing is ever moved."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = 0
        self._free: list[int] = []
        self._owned: set[int] = set()

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_owned(self) -> int:
        return len(self._owned)

    def take(self, count: int) -> list[int]:
        """Hand out blocks, growing the pool when too few are free."""
        if count > len(self._free):
            grown = max(2 * self.num_blocks, self.num_blocks + count)
            self._free.extend(range(self.num_blocks, grown))
            self.num_blocks = grown
        blocks, self._free = self._free[:count], self._free[count:]
        self._owned.update(blocks)
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        assert self._owned.issuperset(blocks), "a block was given back that nobody owned"
        self._owned.difference_update(blocks)
        self._free.extend(blocks)

    def check_integrity(self) -> None:
        """Every block is free or owned, none is both, none is lost."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._owned, "a block is free and owned"
        assert free | self._owned == set(range(self.num_blocks)), "a block is lost"


class SlotTable:
    """The slots of one sequence, in the order of its tokens, scratch slots behind them."""

    def __init__(self, pool: BlockPool, device: torch.device) -> None:
        self._pool = pool
        self._blocks: list[int] = []
        self.slots = torch.empty(0, dtype=torch.long, device=device)

    def reserve(self, num_slots: int) -> None:
        """Have at least this many slots."""
        size = self._pool.block_size
        missing = -(-num_slots // size) - len(self._blocks)
        if missing > 0:
            blocks = self._pool.take(missing)
            self._blocks.extend(blocks)
            firsts = torch.tensor(blocks, device=self.slots.device) * size
            offsets = torch.arange(size, device=self.slots.device)
            self.slots = torch.cat([self.slots, (firsts[:, None] + offsets).flatten()])

    def slice(self, start: int, stop: int) -> Tensor:
        return self.slots[start:stop]

    def release(self) -> None:
        """Give everything back; the table is empty afterwards."""
        self._pool.give_back(self._blocks)
        self._blocks = []
        # Not a view of the old table: torch aborts when one dies in the interpreter's last moments.
        self.slots = torch.empty(0, dtype=torch.long, device=self.slots.device)
