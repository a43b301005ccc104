"""Features that a head has not asked for yet.

Fusing them one token at a time costs as much as fusing many. So rows of committed tokens wait where
passes left them, until the head drafts, until there are many, or until someone else may look: who
reads the head's memory, and requests that find a kept prefix there.

Legend: N rows that wait, X rows that there is room for, F tapped features.
"""

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from fledge.engine.cache import PagedCache
from fledge.engine.head_drafter import FEATURES, HeadDrafter
from fledge.engine.sequence import Sequence
from fledge.ops.native_chains import TokenChain

MOST_WAITING = 32


class WaitingFeatures:
    """The first rows of a buffer, and where they belong."""

    def __init__(self, rows_XF: Tensor, drafter: HeadDrafter, cache: PagedCache) -> None:
        self.rows_XF, self._drafter, self._cache = rows_XF, drafter, cache
        self.slots: list[int] = []
        """Of the rows that wait, in their order."""

    def keep(self, sequences: Many[Sequence], chains: Many[TokenChain], before: Many[int]) -> None:
        """A pass left its rows behind those that wait; those of committed tokens wait too.

        `before` is how many tokens of each request were in the cache before the pass.
        """
        slots, window, size = self.slots, self._drafter.window, self._cache.block_size
        row = len(slots)
        for seq, chain, old in zip(sequences, chains, before, strict=True):
            blocks, first = seq.blocks[window], len(slots)
            for number in range(old, seq.kv_len):
                slots.append(blocks[number // size] * size + number % size)
            if row > first:  # rows of refused drafts lie between
                count = len(slots) - first
                self.rows_XF[first : first + count] = self.rows_XF[row : row + count].clone()
            row += len(chain.token_ids)
        if len(slots) > MOST_WAITING:
            self.hand_over()

    @torch.no_grad()
    def hand_over(self) -> None:
        """Fuse all that wait, and put them where they belong."""
        if self.slots:
            fused_ND = self._drafter.head.fuse(self.rows_XF[: len(self.slots)])
            self._cache.head_memory.write(FEATURES, torch.tensor(self.slots), fused_ND)
            self.slots.clear()
