"""Paged cache memory of the target and the head: who holds which block, and what is kept.

Every kind of attention (full, or a window) has its own pool of blocks and its own table of blocks
per running request. The head's entries and the fused features it reads lie in the blocks of the
kind it attends with, at the slots of their own tokens.

A request's tokens are numbered from 0. Of a running request, numbers below `kv_len` have target
entries; the numbers behind are room for the tokens and drafts of the next pass.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from fledge.engine.block_rows import BlockRows
from fledge.engine.blocks import NOT_THERE, BlockPool
from fledge.engine.cache_integrity import check_blocks
from fledge.engine.known_prefixes import KnownPrefixes
from fledge.engine.prefix import PrefixNode
from fledge.engine.sequence import Sequence
from fledge.ops.kv import KVGroups, KVPool
from fledge.ops.paged import BlockTables
from fledge.ops.staging import send


class PagedCache:
    """Blocks, tables and memory of one engine."""

    def __init__(
        self,
        num_blocks: dict[int | None, int],
        *,
        block_size: int,
        max_requests: int,
        max_tokens: int,
        device: torch.device,
        head_window: int | None = None,
        target_windows: Iterable[int | None] = (None,),
        shares_prefixes: bool = True,
    ) -> None:
        """`max_tokens` is the longest a request may become, room for its drafts included."""
        self.block_size = block_size
        self._num_blocks_of = dict(num_blocks)
        self.shares_prefixes = shares_prefixes
        self._head_window = head_window
        # One block more than there are to hand out: what the spare row shows.
        num_slots = {window: (count + 1) * block_size for window, count in num_blocks.items()}
        self.target_memory = KVGroups({window: num_slots[window] for window in target_windows})
        self.head_memory = KVPool(num_slots.get(head_window, 0))
        width = -(-max_tokens // block_size)
        self._rows = BlockRows(num_blocks, max_requests + 1, width, device)
        self.reset()

    def reset(self) -> None:
        """Forget every request and all that was kept; the memory itself stays."""
        self._pools = {
            window: BlockPool(count, window) for window, count in self._num_blocks_of.items()
        }
        self.known = KnownPrefixes(self._pools, self.block_size, self._head_window)
        self._rows.reset(self._num_blocks_of)
        self._free_rows = list(reversed(range(self.spare_row)))

    @property
    def spare_row(self) -> int:
        """A row of the tables for nobody: whatever is written there is never read."""
        return self._rows.shape[0] - 1

    @property
    def all_tables(self) -> BlockTables:
        """The tables by row; they stay where they are for as long as the cache lives."""
        return BlockTables(self.block_size, self._rows.tables)

    @property
    def capacity(self) -> int | None:
        """Tokens that fit when one request has everything; None when windows let go of the old."""
        pools = [self._pools[one] for one in self._pools if not self._lets_go_in_time(one)]
        return min((pool.num_blocks * self.block_size for pool in pools), default=None)

    def _lets_go_in_time(self, window: int | None) -> bool:
        """Whether a request of any length finds room, because a window gives back old blocks."""
        if window is None:
            return False
        return self._pools[window].num_blocks > self._num_blocks(window)

    @property
    def max_chunk(self) -> int:
        """Tokens one request may read in a pass: a window frees old blocks only afterwards."""
        chunks = [
            (pool.num_blocks - self._num_blocks(window + 1) - 1) * self.block_size
            for window, pool in self._pools.items()
            if window is not None and self._lets_go_in_time(window)
        ]
        return max(1, min(chunks, default=self.max_tokens))

    @property
    def max_tokens(self) -> int:
        """Token numbers that a row of the tables has places for."""
        return self._rows.shape[1] * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.target_memory.num_bytes + self.head_memory.num_bytes

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def usage(self) -> float:
        """Share of the fullest pool that requests hold."""
        return max(pool.num_used / pool.num_blocks for pool in self._pools.values())

    @property
    def num_evicted(self) -> int:
        return sum(pool.num_evicted for pool in self._pools.values())

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of finished requests that a new one could reuse, in the fullest pool."""
        return max(pool.num_kept for pool in self._pools.values()) * self.block_size

    def tables(self, sequences: Many[Sequence]) -> BlockTables:
        return self.all_tables[send([seq.row for seq in sequences], self._rows.device)]

    def has_room(self, seq: Sequence, num_tokens: int, spare_blocks: int = 0) -> bool:
        """Whether a request could grow to this many tokens, with some blocks left for others."""
        for window, pool in self._pools.items():
            needed = self._num_blocks(num_tokens) - len(seq.blocks.get(window, ()))
            if window is not None:
                # However long it becomes, a window lets go of old blocks on the way.
                needed = min(needed, self._num_blocks(window) + 2)
            if pool.num_available < needed + min(spare_blocks, pool.num_blocks // 8):
                return False
        return True

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def start(self, seq: Sequence) -> None:
        """Give a request a row of the tables, and what is kept of its tokens."""
        seq.row = self._free_rows.pop()
        seq.blocks = {window: [] for window in self._pools}
        if self.shares_prefixes:
            self._reuse(seq)
        seq.num_reused = seq.kv_len

    def _reuse(self, seq: Sequence) -> None:
        match = self.known.match(seq)
        for node in match.nodes:
            for window, pool in self._pools.items():
                block = node.blocks.get(window, NOT_THERE)
                # Behind a window there may be gaps, and what lies before a gap is never read.
                if block != NOT_THERE:
                    pool.share(block)
                seq.blocks[window].append(block)
        seq.nodes = list(match.nodes)
        seq.kv_len = len(match.nodes) * self.block_size
        seq.lacks_features = match.lacks_features
        seq.head_len = max(1, self.known.num_head_entries(match.nodes))
        self._rows.show(seq, 0)
        if match.tail is not None:
            self._copy_tail(seq, match.tail, match.tail_len)
        self._rows.flush()
        self.free_behind_windows(seq)

    def _copy_tail(self, seq: Sequence, tail: PrefixNode, length: int) -> None:
        """Copy on write: the request gets a block of its own with the tokens it shares."""
        if any(pool.num_available < 2 for pool in self._pools.values()):
            return  # taking a block could evict the one to be copied
        place, had_all = len(seq.nodes), seq.head_len >= seq.kv_len
        slots_L = torch.arange(length, device=self._rows.device)
        for window, pool in self._pools.items():
            source = tail.blocks[window]
            pool.share(source)
            (block,) = pool.take(1)
            seq.blocks[window].append(block)
            from_1L, to_1L = ((one * self.block_size + slots_L)[None] for one in (source, block))
            self._compact(window, from_1L, to_1L)
            pool.give_back(source)
        self._rows.show(seq, place)
        seq.kv_len += length
        if had_all and tail.has_head_entries:
            seq.head_len = max(1, seq.kv_len)

    def move(
        self, tables: BlockTables, requests_BL: Tensor, from_BL: Tensor, to_BL: Tensor
    ) -> None:
        """Copy entries from token numbers to token numbers in every layer, one request a row."""
        for window in self._pools:
            old_BL, new_BL = (tables.slots(window, requests_BL, one) for one in (from_BL, to_BL))
            self._compact(window, old_BL, new_BL)

    def _compact(self, window: int | None, from_BL: Tensor, to_BL: Tensor) -> None:
        if window in self.target_memory.pools:
            self.target_memory.pools[window].compact(from_BL, to_BL)
        if window == self._head_window:
            self.head_memory.compact(from_BL, to_BL)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Have room for numbers below `num_tokens`; takes nothing where there is not enough."""
        has_room = self._take(seq, self._num_blocks(num_tokens))
        self._rows.flush()
        return has_room

    def reserve_behind(self, sequences: Many[Sequence], count: int) -> bool:
        """Have room for so many numbers behind each one's newest, as far as there is enough."""
        size = self.block_size
        short = [
            seq
            for seq in sequences
            if min(map(len, seq.blocks.values())) * size < len(seq.token_ids) + count
        ]
        has_room = all(self._take(seq, self._num_blocks(seq.len + count)) for seq in short)
        self._rows.flush()
        return has_room

    def _take(self, seq: Sequence, needed: int) -> bool:
        first = min(map(len, seq.blocks.values()), default=needed)
        if first >= needed:
            return True
        missing = {window: needed - len(blocks) for window, blocks in seq.blocks.items()}
        if any(self._pools[window].num_available < count for window, count in missing.items()):
            return False
        for window, count in missing.items():
            seq.blocks[window].extend(self._pools[window].take(count))
        self._rows.show(seq, first)
        return True

    def most_readable(self, seq: Sequence) -> int:
        """Tokens of a request that its windows have room to read in the next pass, at least one."""
        ends = [
            len(blocks) + self._pools[window].num_available
            for window, blocks in seq.blocks.items()
            if window is not None
        ]
        if not ends:
            return self.max_chunk
        return max(1, min(self.max_chunk, min(ends) * self.block_size - seq.kv_len))

    def trim(self, seq: Sequence, num_tokens: int) -> bool:
        """Give back the blocks behind numbers below `num_tokens`; whether there were any."""
        needed = self._num_blocks(num_tokens)
        behind = {window: blocks[needed:] for window, blocks in seq.blocks.items()}
        for window, blocks in behind.items():
            for block in blocks:
                self._pools[window].give_back(block)
            del seq.blocks[window][needed:]
            self._rows.hide(window, seq, slice(needed, None))
        return any(behind.values())

    def free_behind_windows(self, seq: Sequence) -> None:
        """Let go of blocks in which every position is older than any window still sees."""
        for window, blocks in seq.blocks.items():
            if window is None:
                continue
            # One position more than attention sees: a head reads the feature before its first key.
            num_stale = max(0, seq.kv_len - window) // self.block_size
            for place in range(seq.num_freed.get(window, 0), num_stale):
                if blocks[place] != NOT_THERE:
                    self._pools[window].give_back(blocks[place])
                    blocks[place] = NOT_THERE
                    self._rows.hide(window, seq, place)
            seq.num_freed[window] = max(num_stale, seq.num_freed.get(window, 0))

    def tidy(self, sequences: Iterable[Sequence]) -> None:
        """Make whole blocks known that requests have filled, let go of what no window sees."""
        if self.shares_prefixes:
            self.known.publish_fresh([seq for seq in sequences if seq.row >= 0])
        if self._pools.keys() != {None}:
            for seq in sequences:
                self.free_behind_windows(seq)

    def release(self, seq: Sequence, *, keep: bool = True) -> None:
        """Take everything back; `keep` leaves what was computed for later requests."""
        if keep and self.shares_prefixes:
            self.known.publish_all(seq)
        elif not keep:
            self.known.forget(seq)
        for window, blocks in seq.blocks.items():
            # The end first: it is evicted first, and a prefix without its beginning is useless.
            for block in reversed(blocks):
                if block != NOT_THERE:
                    self._pools[window].give_back(block)
            self._rows.hide(window, seq)
        self._free_rows.append(seq.row)
        seq.leave_cache()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """No block is lost, none is shared wrongly, and the tables say what the requests hold."""
        check_blocks(list(sequences), self._pools, self._rows.tables, self._free_rows)

    def check_nothing_held(self) -> None:
        """The same while nothing runs, at no cost."""
        assert not any(pool.num_used for pool in self._pools.values()), "a block is lost"
        assert len(self._free_rows) == self.spare_row, "a row of the tables is lost"
