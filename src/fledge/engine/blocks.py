"""Blocks of cache slots: free, in use by some requests, or kept for whoever needs them again.

A block in use has as many references as requests that read it. When the last one lets go, a block
whose content has a place in the prefix tree is kept, and taken back only when nothing else is free,
the longest unused first.
"""

from collections import OrderedDict, deque

from fledge.engine.prefix import PrefixNode

NOT_THERE = -1
"""In place of a block that a window has let go of."""


class BlockPool:
    """The blocks that layers with one kind of attention share; `window` names that kind."""

    def __init__(self, num_blocks: int, window: int | None) -> None:
        self.num_blocks = num_blocks
        self.window = window
        self.num_evicted = 0
        self._free = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._nodes: dict[int, PrefixNode] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def take(self, count: int) -> list[int]:
        """Hand out blocks; the caller has seen that there are enough."""
        assert count <= self.num_available, "more blocks were taken than there are"
        blocks = []
        for _ in range(count):
            block = self._free.popleft() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """One more request reads a block that the prefix tree knows."""
        assert block in self._nodes, "a block was shared that has no place in the prefix tree"
        self._kept.pop(block, None)
        self._references[block] += 1

    def give_back(self, block: int) -> None:
        """One request fewer reads it."""
        assert self._references[block] > 0, "a block was given back that nobody uses"
        self._references[block] -= 1
        if self._references[block]:
            return
        if block in self._nodes:
            self._kept[block] = None
        else:
            self._free.append(block)

    def num_readers(self, block: int) -> int:
        return self._references[block]

    def is_known(self, block: int) -> bool:
        return block in self._nodes

    def remember(self, block: int, node: PrefixNode) -> None:
        """The block's content is final and stands in the prefix tree."""
        assert self._references[block] > 0, "a block was published that nobody owns"
        assert block not in self._nodes, "a block was published twice"
        self._nodes[block] = node
        node.blocks[self.window] = block

    def replace(self, old: int, new: int) -> None:
        """Another block with the same tokens stands in the prefix tree from now on."""
        assert self._references[old] < 2, "a block was replaced that several read"
        node = self._nodes.pop(old)
        if old in self._kept:
            del self._kept[old]
            self._free.append(old)
        self.remember(new, node)

    def forget(self, block: int) -> None:
        """Take a block out of the prefix tree: its content is not to be trusted or is leaving."""
        assert self._references[block] < 2, "a block was forgotten that several read"
        node = self._nodes.pop(block)
        node.drop_block(self.window)
        if block in self._kept:
            del self._kept[block]
            self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._kept.popitem(last=False)
        self._nodes.pop(block).drop_block(self.window)
        self.num_evicted += 1
        return block

    def check_integrity(self, readers: dict[int, int]) -> None:
        """No block is lost or shared wrongly; `readers` counts the requests that hold each."""
        free, kept = set(self._free), set(self._kept)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & kept, "a block is free and kept"
        assert not readers.keys() & (free | kept), "a block is free or kept while it is read"
        assert len(free) + len(kept) + len(readers) == self.num_blocks, "a block is lost"
        for block, count in readers.items():
            assert self._references[block] == count, f"block {block}: wrong number of references"
        assert sum(self._references) == sum(readers.values()), "wrong number of references"
        shared = [block for block, count in readers.items() if count > 1]
        assert self._nodes.keys() >= {*shared, *kept}, "a block is shared without being published"
        linked: set[PrefixNode] = set()
        for block, node in self._nodes.items():
            assert node.blocks.get(self.window) == block, f"block {block}: wrong place in the tree"
            above: PrefixNode | None = node
            while above is not None and above not in linked:
                assert above.is_linked, f"block {block} hangs below a forgotten place"
                linked.add(above)
                above = above.parent
