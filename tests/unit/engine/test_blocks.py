"""Blocks are free, in use or kept, never two of these, and come back in the right order.

Catches: a block handed out while somebody reads it, one that is lost or freed twice, the newest
evicted before the oldest, a block that stays in the prefix tree after its content has gone, and an
integrity check that sees none of it.
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from fledge.engine.blocks import BlockPool
from fledge.engine.prefix import PrefixNode


def pool_of(num_blocks: int, num_known: int = 0) -> tuple[BlockPool, PrefixNode]:
    """A pool whose blocks 0, 1, ... are kept for tokens (0,), (1,), ..., and the tree's root."""
    pool, root = BlockPool(num_blocks, None), PrefixNode(None, ())
    for block in pool.take(num_known):
        pool.remember(block, root.add_child((block,)))
        pool.give_back(block)
    return pool, root


def test_all_blocks_can_be_taken_once() -> None:
    pool, _ = pool_of(5)
    assert sorted(pool.take(2) + pool.take(3)) == [0, 1, 2, 3, 4]
    assert (pool.num_available, pool.num_used, pool.num_kept) == (0, 5, 0)
    with pytest.raises(AssertionError, match="more blocks were taken than there are"):
        pool.take(1)


def test_unpublished_blocks_are_free_when_their_owner_lets_go() -> None:
    pool, _ = pool_of(2)
    first, second = pool.take(2)
    pool.give_back(second)
    assert pool.take(1) == [second]
    assert pool.num_evicted == 0
    pool.give_back(first)
    assert (pool.num_available, pool.num_kept) == (1, 0)
    with pytest.raises(AssertionError, match="given back that nobody uses"):
        pool.give_back(first)


def test_free_blocks_go_before_kept_ones_and_the_longest_unused_first() -> None:
    pool, root = pool_of(5, num_known=3)
    assert (pool.num_available, pool.num_kept, pool.num_used) == (5, 3, 0)
    assert pool.take(2) == [3, 4]
    assert pool.num_evicted == 0
    pool.share(0)
    pool.give_back(0)  # used again: now 1 is the oldest
    assert pool.take(1) == [1]
    assert root.child((1,)) is None
    assert root.child((0,)) is not None
    assert pool.take(1) == [2]
    assert pool.take(1) == [0]
    assert pool.num_evicted == 3
    assert (pool.num_available, pool.num_kept) == (0, 0)
    pool.check_integrity(Counter(range(5)))


def test_a_block_is_kept_only_after_its_last_reader() -> None:
    pool, _ = pool_of(2, num_known=1)
    pool.share(0)
    pool.share(0)
    assert (pool.num_readers(0), pool.num_kept) == (2, 0)
    pool.give_back(0)
    assert (pool.num_readers(0), pool.num_kept) == (1, 0)
    assert pool.take(1) == [1], "the one in use is not to be had"
    assert pool.num_available == 0
    pool.give_back(0)
    assert (pool.num_readers(0), pool.num_kept) == (0, 1)


def test_only_published_blocks_are_shared() -> None:
    pool, root = pool_of(2)
    (block,) = pool.take(1)
    with pytest.raises(AssertionError, match="no place in the prefix tree"):
        pool.share(block)
    pool.remember(block, root.add_child((7,)))
    pool.share(block)
    assert pool.num_readers(block) == 2
    assert pool.is_known(block)
    with pytest.raises(AssertionError, match="published twice"):
        pool.remember(block, root.add_child((8,)))
    with pytest.raises(AssertionError, match="published that nobody owns"):
        pool.remember(1, root.add_child((8,)))


def test_a_forgotten_block_is_free_at_once_or_when_its_reader_lets_go() -> None:
    pool, root = pool_of(3, num_known=2)
    pool.forget(0)
    assert root.child((0,)) is None
    assert (pool.num_kept, pool.num_available) == (1, 3)
    pool.share(1)
    pool.forget(1)
    assert root.child((1,)) is None
    assert not pool.is_known(1)
    assert (pool.num_readers(1), pool.num_available) == (1, 2)
    pool.check_integrity({1: 1})
    pool.give_back(1)
    assert (pool.num_kept, pool.num_available) == (0, 3)
    pool.check_integrity({})


def test_what_several_read_is_not_forgotten() -> None:
    pool, _ = pool_of(1, num_known=1)
    pool.share(0)
    pool.share(0)
    with pytest.raises(AssertionError, match="forgotten that several read"):
        pool.forget(0)


def test_pools_of_two_windows_share_places_but_not_blocks() -> None:
    full, short, root = BlockPool(2, None), BlockPool(2, 8), PrefixNode(None, ())
    node = root.add_child((5,))
    for pool in (full, short):
        (block,) = pool.take(1)
        pool.remember(block, node)
        pool.give_back(block)
    assert node.blocks == {None: 0, 8: 0}
    short.forget(0)
    assert node.blocks == {None: 0}
    assert node.is_linked
    full.take(2)
    assert not node.is_linked
    full.check_integrity({0: 1, 1: 1})
    short.check_integrity({})


def corrupt_lost(pool: BlockPool) -> None:
    pool._free.popleft()


def corrupt_free_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def corrupt_free_and_used(pool: BlockPool) -> None:
    pool._free.append(1)


def corrupt_free_and_kept(pool: BlockPool) -> None:
    pool._free.append(2)


def corrupt_count(pool: BlockPool) -> None:
    pool._references[1] += 1


def corrupt_shared_unpublished(pool: BlockPool) -> None:
    pool._nodes.pop(0).blocks.clear()


def corrupt_kept_unpublished(pool: BlockPool) -> None:
    pool._nodes.pop(2).blocks.clear()


def corrupt_place(pool: BlockPool) -> None:
    pool._nodes[0].blocks[None] = 2


def corrupt_tree(pool: BlockPool) -> None:
    pool._nodes[0].parent = PrefixNode(None, ())


def corrupt_tree_above(pool: BlockPool) -> None:
    node = pool._nodes[0]
    node.parent = PrefixNode(PrefixNode(None, ()), (9,))
    node.parent._children = {0: {(0,): node}}


def corrupt_unread_count(pool: BlockPool) -> None:
    pool._references[3] = 1


CORRUPTIONS: list[tuple[Callable[[BlockPool], None], str]] = [
    (corrupt_lost, "is lost"),
    (corrupt_free_twice, "free twice"),
    (corrupt_free_and_used, "free or kept while it is read"),
    (corrupt_free_and_kept, "free and kept"),
    (corrupt_count, "wrong number of references"),
    (corrupt_shared_unpublished, "shared without being published"),
    (corrupt_kept_unpublished, "shared without being published"),
    (corrupt_place, "wrong place in the tree"),
    (corrupt_tree, "hangs below a forgotten place"),
    (corrupt_tree_above, "hangs below a forgotten place"),
    (corrupt_unread_count, "wrong number of references"),
]


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS)
def test_integrity_sees_every_kind_of_damage(
    corrupt: Callable[[BlockPool], None], message: str
) -> None:
    """Block 0 has two readers, 1 an owner of its own, 2 is kept, 3 and 4 are free."""
    pool, root = pool_of(5, num_known=1)
    pool.share(0)
    pool.share(0)
    _, kept = pool.take(2)
    pool.remember(kept, root.add_child((kept,)))
    pool.give_back(kept)
    readers = {0: 2, 1: 1}
    pool.check_integrity(readers)
    corrupt(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(readers)


@pytest.mark.parametrize(
    ("readers", "message"),
    [
        ({}, "is lost"),
        ({0: 1}, "wrong number of references"),
        ({0: 2, 1: 1}, "while it is read"),
        ({1: 1}, "while it is read"),
    ],
)
def test_integrity_compares_with_what_the_requests_hold(
    readers: dict[int, int], message: str
) -> None:
    pool, _ = pool_of(3, num_known=1)
    pool.share(0)
    pool.share(0)
    pool.check_integrity({0: 2})
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(readers)


@pytest.mark.parametrize("seed", range(5))
def test_random_use_against_a_plain_model(seed: int) -> None:
    """A list of kept blocks in the order they were let go, and a counter of readers."""
    rng = random.Random(seed)
    pool, root = pool_of(7)
    readers: Counter[int] = Counter()
    known: set[int] = set()
    kept: list[int] = []
    for step in range(400):
        readers += Counter()  # without those that have none
        used = sorted(readers)
        action = rng.choice(["take", "share", "give_back", "give_back", "remember", "forget"])
        if action == "take" and pool.num_available:
            had_free = len(used) + len(kept) < 7
            (block,) = pool.take(1)
            if had_free:
                assert block not in kept
            else:
                assert block == kept.pop(0)
                known.discard(block)
            assert block not in readers
            readers[block] = 1
        elif action == "share" and known:
            block = rng.choice(sorted(known))
            pool.share(block)
            readers[block] += 1
            kept = [one for one in kept if one != block]
        elif action == "give_back" and used:
            block = rng.choice(used)
            pool.give_back(block)
            readers[block] -= 1
            if not readers[block]:
                del readers[block]
                kept += [block] if block in known else []
        elif action == "remember" and (new := [one for one in used if one not in known]):
            block = rng.choice(new)
            pool.remember(block, root.add_child((step,)))
            known.add(block)
        elif action == "forget" and (own := [one for one in known if readers[one] < 2]):
            block = rng.choice(sorted(own))
            pool.forget(block)
            known.remove(block)
            kept = [one for one in kept if one != block]
        assert (pool.num_kept, pool.num_used) == (len(kept), len(readers))
        pool.check_integrity(readers)
