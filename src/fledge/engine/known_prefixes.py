"""What requests have computed and others may use: blocks that stand in the prefix tree.

A block that is full and committed is published; when a request ends, so is the part of a block at
its end, which others copy. What a failed request has computed is forgotten.
"""

from collections.abc import Iterable

from fledge.engine.blocks import NOT_THERE, BlockPool
from fledge.engine.prefix import PrefixMatch, PrefixNode, PrefixTree
from fledge.engine.sequence import Sequence


class KnownPrefixes:
    """The prefix tree, and which blocks of the pools stand in it."""

    def __init__(
        self, pools: dict[int | None, BlockPool], block_size: int, head_window: int | None
    ) -> None:
        self._pools = pools
        self._block_size = block_size
        self._head_window = head_window
        self.tree = PrefixTree(block_size, tuple(pools))
        self.needs_features = False
        """Whether requests that come are to be drafted for: what lacks features is of no use."""

        self.examined: frozenset[Sequence] | None = None
        """In an exam of the head, those of them that are."""

    def match(self, seq: Sequence) -> PrefixMatch:
        """What is known of a request's tokens."""
        # The last token is always read: its logits choose the next one.
        limit = len(seq.token_ids) - 1
        is_told = self.needs_features and (self.examined is None or seq in self.examined)
        return self.tree.match(seq.token_ids, limit, needs_features=is_told)

    def num_shared(self, seq: Sequence) -> int:
        """Tokens of a waiting request in blocks that running ones hold, of every kind."""
        held = [
            all(
                pool.num_readers(node.blocks[w])
                for w, pool in self._pools.items()
                if w in node.blocks
            )
            for node in self.match(seq).nodes
        ]
        return sum(held) * self._block_size

    def num_head_entries(self, nodes: Iterable[PrefixNode]) -> int:
        """Tokens from the start whose head entries are there too."""
        count = 0
        for node in nodes:
            if not node.has_head_entries:
                break
            count += self._block_size
        return count

    def publish_fresh(self, sequences: Iterable[Sequence]) -> None:
        """Publish what these have filled since they were looked at last: mostly nothing."""
        size = self._block_size
        for seq in sequences:
            num_known = len(seq.nodes)
            if (num_known + 1) * size <= seq.kv_len or (
                seq.num_noted < num_known and (seq.num_noted + 1) * size <= seq.head_len
            ):
                self.publish(seq)

    def publish(self, seq: Sequence) -> None:
        """Make the whole blocks a request has filled known to later requests."""
        size = self._block_size
        for place in range(len(seq.nodes), seq.kv_len // size):
            token_ids = tuple(seq.token_ids[place * size : (place + 1) * size])
            seq.nodes.append(self._publish_block(seq, place, token_ids))
        for place in range(seq.num_noted, min(len(seq.nodes), seq.head_len // size)):
            self._note_head_entries(seq, place, seq.nodes[place])
            seq.num_noted = place + 1

    def publish_all(self, seq: Sequence) -> None:
        """The same for a request that ends, with the block it has filled only in part."""
        self.publish(seq)
        place = len(seq.nodes)
        token_ids = tuple(seq.token_ids[place * self._block_size : seq.kv_len])
        if token_ids:
            node = self._publish_block(seq, place, token_ids)
            if seq.head_len >= seq.kv_len:
                self._note_head_entries(seq, place, node)

    def _publish_block(self, seq: Sequence, place: int, token_ids: tuple[int, ...]) -> PrefixNode:
        parent = self._place_before(seq, place)
        node = parent.child(token_ids) or parent.add_child(token_ids)
        for window, pool in self._pools.items():
            block = seq.blocks[window][place]
            is_new = block != NOT_THERE and not pool.is_known(block)
            if is_new and window not in node.blocks:
                pool.remember(block, node)
                if window == self._head_window:
                    node.lacks_features = seq.lacks_features
            elif is_new and window == self._head_window:
                self._complete(seq, node, block)
        return node

    def _complete(self, seq: Sequence, node: PrefixNode, block: int) -> None:
        """The head slept when a block was read; now a request has read the same for it too."""
        pool, old = self._pools[self._head_window], node.blocks[self._head_window]
        if node.lacks_features and not seq.lacks_features and pool.num_readers(old) < 2:
            pool.replace(old, block)
            node.lacks_features = node.has_head_entries = False

    def _place_before(self, seq: Sequence, place: int) -> PrefixNode:
        """Where a block hangs. Memory pressure may have eaten the place: another's was kept there.

        Then the request's own blocks take it.
        """
        first = place
        while first and not seq.nodes[first - 1].is_linked:
            first -= 1
        seq.num_noted = min(seq.num_noted, first)
        for i in range(first, place):
            seq.nodes[i] = self._publish_block(seq, i, seq.nodes[i].token_ids)
        return seq.nodes[place - 1] if place else self.tree.root

    def _note_head_entries(self, seq: Sequence, place: int, node: PrefixNode) -> None:
        """The head has read up to the end of a block; did it read all of it, and is it this one?"""
        blocks = seq.blocks.get(self._head_window)
        is_whole = place * self._block_size >= seq.head_first or seq.head_first <= 1
        if blocks and is_whole and node.blocks.get(self._head_window) == blocks[place]:
            node.has_head_entries = True

    def forget(self, seq: Sequence) -> None:
        """Nobody may reuse what a failed request has computed; what others read stays theirs."""
        for window, pool in self._pools.items():
            for block in seq.blocks[window]:
                if block != NOT_THERE and pool.is_known(block) and pool.num_readers(block) == 1:
                    pool.forget(block)
