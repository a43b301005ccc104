"""The longest usable prefix, compared with a slow reference that looks at every stored sequence.

Catches: a hit under other parents or past a missing block, a window whose blocks are not all there,
a tail that is longer than what is common, a hit that leaves no token to read, and places that stay
in the tree after everything in them was evicted.
"""

import random
from collections.abc import Iterator

import pytest

from fledge.engine.prefix import PrefixMatch, PrefixNode, PrefixTree

Windows = tuple[int | None, ...]
FULL: Windows = (None,)


def store(tree: PrefixTree, token_ids: list[int], size: int, windows: Windows) -> None:
    """Make all places of a sequence, its last part as a short leaf, each with all its blocks."""
    node = tree.root
    for start in range(0, len(token_ids), size):
        part = tuple(token_ids[start : start + size])
        node = node.child(part) or node.add_child(part)
        for window in windows:
            node.blocks.setdefault(window, 0)


def walk(node: PrefixNode) -> Iterator[PrefixNode]:
    yield node
    for siblings in node._children.values():
        assert siblings, "a first token without children"
        for child in siblings.values():
            yield from walk(child)


def matched_len(match: PrefixMatch) -> int:
    return sum(len(node.token_ids) for node in match.nodes) + match.tail_len


def path(match: PrefixMatch) -> list[int]:
    return [token for node in match.nodes for token in node.token_ids]


def test_nothing_stored_nothing_found() -> None:
    match = PrefixTree(4, FULL).match([1, 2, 3, 4, 5], 4)
    assert match == PrefixMatch((), None, 0)


def test_whole_blocks_then_a_part_of_one() -> None:
    tree = PrefixTree(4, FULL)
    store(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 4, FULL)
    match = tree.match([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99], 10)
    assert path(match) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert match.tail is not None
    assert (match.tail.token_ids, match.tail_len) == ((9, 10, 11), 2)


@pytest.mark.parametrize(("limit", "num_nodes", "tail_len"), [(8, 2, 0), (7, 1, 3), (4, 1, 0)])
def test_a_match_ends_where_it_is_told(limit: int, num_nodes: int, tail_len: int) -> None:
    """The caller leaves the last token unread; a whole block that reaches past it is a tail."""
    tree = PrefixTree(4, FULL)
    store(tree, list(range(12)), 4, FULL)
    match = tree.match(list(range(12)), limit)
    assert (len(match.nodes), match.tail_len) == (num_nodes, tail_len)


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_less_than_a_block_is_found_as_a_tail(limit: int) -> None:
    tree = PrefixTree(4, FULL)
    store(tree, [1, 2, 3], 4, FULL)
    match = tree.match([1, 2, 3, 4], limit)
    assert (match.nodes, match.tail_len) == ((), limit)


def test_the_same_tokens_below_other_tokens_are_no_match() -> None:
    tree = PrefixTree(2, FULL)
    store(tree, [1, 2, 3, 4], 2, FULL)
    assert matched_len(tree.match([9, 9, 3, 4, 5], 4)) == 0
    assert matched_len(tree.match([3, 4, 5, 6, 7], 4)) == 0
    assert matched_len(tree.match([1, 9, 3, 4, 5], 4)) == 1


def test_short_leaves_are_never_whole_blocks() -> None:
    """Nothing hangs below a part of a block, and a part is copied, never read in place."""
    tree = PrefixTree(4, FULL)
    store(tree, [1, 2, 3], 4, FULL)
    match = tree.match([1, 2, 3, 4, 5, 6, 7, 8], 7)
    assert match.nodes == ()
    assert match.tail_len == 3


def test_the_longest_of_several_tails_wins() -> None:
    tree = PrefixTree(4, FULL)
    for tail in ([5, 6], [5, 6, 7], [5, 9, 9, 9], [6, 6, 7, 8]):
        store(tree, [1, 2, 3, 4, *tail], 4, FULL)
    match = tree.match([1, 2, 3, 4, 5, 6, 7, 8, 9], 8)
    assert match.tail is not None
    assert (match.tail.token_ids, match.tail_len) == ((5, 6, 7), 3)


def test_a_crowd_of_siblings_costs_no_search() -> None:
    """Only the newest are looked at; a hit there is a hit, none is only a loss."""
    tree = PrefixTree(4, FULL)
    for i in range(100):
        store(tree, [1, i, i, i], 4, FULL)
    assert tree.match([1, 99, 99, 5, 5], 4).tail_len == 3
    assert tree.match([1, 0, 0, 5, 5], 4).tail_len == 1


def test_full_attention_needs_every_block_of_the_way() -> None:
    tree = PrefixTree(2, FULL)
    store(tree, list(range(8)), 2, FULL)
    second = tree.match(list(range(8)), 4).nodes[1]
    del second.blocks[None]
    match = tree.match(list(range(8)), 7)
    assert (len(match.nodes), match.tail) == (1, None)


@pytest.mark.parametrize("missing", range(6))
def test_a_window_needs_its_last_blocks_only(missing: int) -> None:
    """Size 2, window 3, 12 tokens stored: behind n blocks, position 2n - 3 is the oldest needed.

    One more than attention sees (2n - 2), for a head reads the feature before its first key.
    """
    windows: Windows = (3,)
    tree = PrefixTree(2, windows)
    tokens = list(range(12))
    store(tree, tokens, 2, windows)
    path = tree.match([*tokens, 99], 12).nodes
    del path[missing].blocks[3]
    # Without block m, counts n are usable when m is not among blocks n - 2 and n - 1.
    usable = [n for n in range(7) if missing not in (n - 2, n - 1)]
    match = tree.match([*tokens, 99], 12)
    assert len(match.nodes) == max(usable)


@pytest.mark.parametrize(("window", "needed"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (99, 3)])
def test_how_many_blocks_a_window_reaches_back(window: int, needed: int) -> None:
    """Behind three blocks of four, the oldest position a window needs is 12 - window."""
    windows: Windows = (None, window)
    tree = PrefixTree(4, windows)
    tokens = list(range(12))
    store(tree, tokens, 4, windows)
    path = tree.match([*tokens, 99], 12).nodes
    for node in path[: 3 - needed]:
        del node.blocks[window]
    assert len(tree.match([*tokens, 99], 12).nodes) == 3
    del path[3 - needed].blocks[window]
    assert len(tree.match([*tokens, 99], 12).nodes) < 3


def test_a_tail_needs_a_block_of_every_window() -> None:
    windows: Windows = (None, 8)
    tree = PrefixTree(4, windows)
    store(tree, [1, 2, 3], 4, windows)
    leaf = tree.root.child((1, 2, 3))
    assert leaf is not None
    assert tree.match([1, 2, 3, 4], 3).tail is leaf
    del leaf.blocks[8]
    assert tree.match([1, 2, 3, 4], 3) == PrefixMatch((), None, 0)


def test_places_go_with_their_last_block() -> None:
    tree = PrefixTree(1, FULL)
    store(tree, [1, 2, 3], 1, FULL)
    store(tree, [1, 2, 4], 1, FULL)
    one, two, three = tree.match([1, 2, 3, 9], 3).nodes
    two.drop_block(None)
    assert two.is_linked, "others hang below it"
    three.drop_block(None)
    assert not three.is_linked
    assert two.is_linked
    four = two.child((4,))
    assert four is not None
    four.drop_block(None)
    assert not two.is_linked
    assert one.is_linked
    one.drop_block(None)
    assert list(walk(tree.root)) == [tree.root]
    assert not tree.root._children


def test_a_place_stays_while_one_window_has_its_block() -> None:
    tree = PrefixTree(2, (None, 8))
    store(tree, [1, 2], 2, (None, 8))
    node = tree.root.child((1, 2))
    assert node is not None
    node.has_head_entries = True
    node.drop_block(8)
    assert node.is_linked
    assert not node.has_head_entries, "they may have been in the block that is gone"
    node.drop_block(None)
    assert not node.is_linked


def slow_match(
    stored: dict[tuple[int, ...], set[int | None]],
    windows: Windows,
    size: int,
    tokens: list[int],
    limit: int,
) -> tuple[int, int]:
    """Whole blocks and tail; `stored` has the windows whose block is there, by path from 0."""
    best = 0
    for count in range(1, limit // size + 1):
        paths = [tuple(tokens[: (i + 1) * size]) for i in range(count)]
        has_all = all(one in stored for one in paths)
        has_full = None not in windows or all(None in stored.get(one, ()) for one in paths)
        has_window = all(
            window in stored.get(tuple(tokens[: (position // size + 1) * size]), ())
            for window in windows
            if window is not None
            for position in range(max(0, count * size - window), count * size)
        )
        if has_all and has_full and has_window:
            best = count
    tail = 0
    for one, there in stored.items():
        below = tuple(tokens[: best * size])
        is_child = best * size < len(one) <= (best + 1) * size and one[: len(below)] == below
        if is_child and there >= set(windows):
            common = 0
            for a, b in zip(one[len(below) :], tokens[len(below) : limit], strict=False):
                if a != b:
                    break
                common += 1
            tail = max(tail, common)
    return best, tail


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5), (None, 2, 6)], ids=str)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_random_trees_with_gaps_against_a_slow_search(windows: Windows, size: int) -> None:
    rng = random.Random(size)
    for _ in range(40):
        tree = PrefixTree(size, windows)
        # Few tokens, so that sequences share beginnings; few siblings, so that all are looked at.
        sequences = [[rng.randrange(2) for _ in range(rng.randrange(1, 16))] for _ in range(6)]
        for one in sequences:
            store(tree, one, size, windows)
        for node in list(walk(tree.root)):
            for window in windows:
                if window in node.blocks and rng.random() < 0.25:
                    node.drop_block(window)
        stored: dict[tuple[int, ...], set[int | None]] = {}
        for node in walk(tree.root):
            above, token_ids = node, list(node.token_ids)
            while (above := above.parent) is not None:
                token_ids = [*above.token_ids, *token_ids]
            assert node is tree.root or node.blocks or node._children, "an empty place was left"
            stored[tuple(token_ids)] = set(node.blocks)
        for _ in range(10):
            asked = rng.choice(sequences)[: rng.randrange(1, 17)]
            asked = asked + [rng.randrange(2) for _ in range(3)]
            match = tree.match(asked, len(asked) - 1)
            best, tail = slow_match(stored, windows, size, asked, len(asked) - 1)
            assert (len(match.nodes), match.tail_len) == (best, tail)
            assert path(match) == asked[: best * size]
