"""Which token sequences have their cache entries kept, as a tree with one block of tokens a node.

    root ── [t0 .. t15] ── [t16 .. t31] ── [t32 .. t36]      a leaf may be shorter than a block
                       └── [u16 .. u31]

Places are found by comparing tokens, never by hashes alone. A node may have lost its blocks in some
kinds of attention (a window has moved on, or memory was needed); what is left decides how much of
it a request can use.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import takewhile

_MOST_SIBLINGS = 16
"""Siblings looked at for a partial match; more would cost more than they save."""


class PrefixNode:
    """The tokens of one block below those of its ancestors."""

    def __init__(self, parent: "PrefixNode | None", token_ids: tuple[int, ...]) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.blocks: dict[int | None, int] = {}
        """Block that holds the entries, by kind of attention."""

        self.has_head_entries = False
        """Whether the head's entries are there too, and not only the target's."""

        self.lacks_features = False
        """Whether the target has read it while the head slept."""

        self._children: dict[int, dict[tuple[int, ...], PrefixNode]] = {}

    @property
    def is_linked(self) -> bool:
        """Whether it is in the tree: places go from the leaves up, so one look is enough."""
        return self.parent is None or self.parent.child(self.token_ids) is self

    def child(self, token_ids: tuple[int, ...]) -> "PrefixNode | None":
        return self._children.get(token_ids[0], {}).get(token_ids)

    def add_child(self, token_ids: tuple[int, ...]) -> "PrefixNode":
        node = PrefixNode(self, token_ids)
        self._children.setdefault(token_ids[0], {})[token_ids] = node
        return node

    def similar_children(self, token_id: int) -> Iterator["PrefixNode"]:
        """Some children that begin with the token, the newest first."""
        siblings = self._children.get(token_id, {})
        for _, node in zip(range(_MOST_SIBLINGS), reversed(siblings.values()), strict=False):
            yield node

    def drop_block(self, window: int | None) -> None:
        """Its entries for one kind of attention are gone; without any, the place goes too."""
        del self.blocks[window]
        self.has_head_entries = False
        node: PrefixNode = self
        while node.parent is not None and not node.blocks and not node._children:
            siblings = node.parent._children[node.token_ids[0]]
            del siblings[node.token_ids]
            if not siblings:
                del node.parent._children[node.token_ids[0]]
            node = node.parent


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How much of a token sequence is kept."""

    nodes: tuple[PrefixNode, ...]
    """Whole blocks, from the start."""

    tail: PrefixNode | None
    """A block whose first `tail_len` tokens go on from there; they can be copied."""

    tail_len: int

    @property
    def lacks_features(self) -> bool:
        """Whether the head slept when some of it was read."""
        used = self.nodes if self.tail is None else (*self.nodes, self.tail)
        return any(node.lacks_features for node in used)


class PrefixTree:
    """Finds the longest usable prefix."""

    def __init__(self, block_size: int, windows: Many[int | None]) -> None:
        self._block_size = block_size
        self._windows = tuple(windows)
        self.root = PrefixNode(None, ())

    def match(
        self, token_ids: Many[int], limit: int, *, needs_features: bool = False
    ) -> PrefixMatch:
        """At most `limit` tokens of the sequence, as many as have all entries a request needs."""
        path = self._whole_blocks(token_ids, limit)
        if needs_features:
            path = list(takewhile(lambda node: not node.lacks_features, path))
        count = len(path)
        while count and not self._windows_hold(path, count):
            count -= 1
        nodes = tuple(path[:count])
        rest = token_ids[count * self._block_size : limit]
        tail, tail_len = self._longest_tail(nodes[-1] if nodes else self.root, rest)
        if needs_features and tail is not None and tail.lacks_features:
            return PrefixMatch(nodes, None, 0)
        return PrefixMatch(nodes, tail, tail_len)

    def _whole_blocks(self, token_ids: Many[int], limit: int) -> list[PrefixNode]:
        """Nodes from the start on; full attention needs every one of their blocks."""
        size, node, path = self._block_size, self.root, []
        for start in range(0, limit - size + 1, size):
            child = node.child(tuple(token_ids[start : start + size]))
            if child is None or (None in self._windows and None not in child.blocks):
                break
            path.append(child)
            node = child
        return path

    def _windows_hold(self, path: list[PrefixNode], count: int) -> bool:
        """Whether the windows still have what the token behind `count` blocks will see."""
        length = count * self._block_size
        return all(
            window in path[place].blocks
            for window in self._windows
            if window is not None
            for place in range(max(0, length - window) // self._block_size, count)
        )

    def _longest_tail(self, node: PrefixNode, rest: Many[int]) -> tuple[PrefixNode | None, int]:
        best, best_len = None, 0
        if not rest:
            return best, best_len
        for child in node.similar_children(rest[0]):
            if all(window in child.blocks for window in self._windows):
                length = _num_common(child.token_ids, rest)
                if length > best_len:
                    best, best_len = child, length
        return best, best_len


def _num_common(first: Many[int], second: Many[int]) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
