"""Passes over paged memory against a reference that lays them out row by row.

Catches: a token, position or number off by one where requests, chains and trees meet; a row that
sees a sibling, another request or a token behind it; a window that counts numbers instead of
positions; and a look at a block that a window has let go of.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.ops.packed import Segment
from fledge.ops.paged import BlockTables, FrontierPass, TreePass, make_tree_pass
from fledge.ops.tree import root_only
from tests.unit.ops.random_passes import PagedCase, frontier_passes, tree_passes
from tests.unit.ops.random_trees import PlainTree, batched


def check_segments(case: PagedCase, segments: tuple[Segment, ...], first_request: int) -> None:
    """Every row of the requests from the given one on, in order, sees just what it should."""
    wanted = [row for row in case.rows if row.request >= first_request]
    assert sum(segment.len for segment in segments) == len(wanted)
    rows = iter(wanted)
    start = len(case.rows) - len(wanted)
    for segment in segments:
        assert segment.start == start
        start += segment.len
        mask_QK = segment.mask(case.window)
        for q in range(segment.len):
            row = next(rows)
            slots = segment.key_slots_K
            if mask_QK is not None:
                slots = slots[mask_QK[q]]
            assert len(set(slots.tolist())) == len(slots)
            assert set(slots.tolist()) == case.seen_slots(row)
            assert segment.query_positions_Q[q] == row.position


def check_writes(case: PagedCase) -> None:
    written = case.packed.view(case.window).write_slots_T.tolist()
    assert written == [case.slot(row.request, row.number) for row in case.rows]
    assert len(set(written)) == len(written)


@given(tree_passes())
def test_chains_and_trees_end_to_end(case: PagedCase) -> None:
    packed = case.packed
    assert isinstance(packed, TreePass)
    assert packed.num_tokens == len(case.rows)
    assert packed.token_ids_T.tolist() == [row.token for row in case.rows]
    assert packed.positions_T.tolist() == [row.position for row in case.rows]
    assert packed.numbers_T.tolist() == [row.number for row in case.rows]
    assert packed.request_T.tolist() == [row.request for row in case.rows]
    requests = [row.request for row in case.rows]
    assert packed.starts_B.tolist() == [requests.index(i) for i in sorted(set(requests))]
    assert packed.num_rows_B.tolist() == [requests.count(i) for i in sorted(set(requests))]


@given(tree_passes())
@settings(max_examples=50)
def test_rows_of_tree_nodes(case: PagedCase) -> None:
    """A node's row is the one whose number is the root's plus the node's; behind, anything goes."""
    packed = case.packed
    assert isinstance(packed, TreePass)
    rows_BN = packed.node_rows(9)
    assert int(rows_BN.max()) < packed.num_tokens
    for request, (context, chain, count) in enumerate(
        zip(packed.context_B, packed.chain_B, packed.num_rows_B, strict=True)
    ):
        for node in range(int(count - chain) + 1):
            row = case.rows[int(rows_BN[request, node])]
            assert row.request == request
            assert row.number == int(context + chain) - 1 + node


@given(tree_passes(), st.integers(0, 4))
@settings(max_examples=100)
def test_what_the_rows_of_a_tree_pass_see(case: PagedCase, first_request: int) -> None:
    check_writes(case)
    view = case.packed.view(case.window)
    check_segments(case, view.segments(first_request), first_request)
    assert view.segments(first_request) is view.segments(first_request), "made once for all layers"


@given(frontier_passes(), st.integers(0, 4))
@settings(max_examples=50)
def test_what_the_nodes_of_a_frontier_see(case: PagedCase, first_request: int) -> None:
    check_writes(case)
    check_segments(case, case.packed.view(case.window).segments(first_request), first_request)


def test_the_picture_of_the_module() -> None:
    """4 cached tokens, a chain c0 c1, and drafts a and b below c1."""
    tables = BlockTables(4, {None: torch.tensor([[2, 0]])})
    trees = batched([PlainTree([11, 12, 13], [0, 0, 0])])
    packed = make_tree_pass(
        chain_tokens_C=torch.tensor([10, 11]),
        chain_B=torch.tensor([2]),
        context_B=torch.tensor([4]),
        trees=trees,
        num_rows=4,
        tables=tables,
        num_short=0,
    )
    assert packed.token_ids_T.tolist() == [10, 11, 12, 13]
    assert packed.numbers_T.tolist() == [4, 5, 6, 7]
    assert packed.positions_T.tolist() == [4, 5, 6, 6]
    (segment,) = packed.view(None).segments()
    assert segment.key_slots_K.tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
    mask = segment.mask(None)
    assert mask is not None
    assert mask[:, 4:].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]


def test_a_pass_without_trees_equals_one_with_only_roots() -> None:
    tables = BlockTables(4, {None: torch.arange(8).view(2, 4)})
    options = {
        "chain_tokens_C": torch.tensor([5, 6, 7]),
        "chain_B": torch.tensor([2, 1]),
        "context_B": torch.tensor([3, 6]),
        "num_rows": 3,
        "tables": tables,
        "num_short": 0,
    }
    without = make_tree_pass(trees=None, **options)
    bare = make_tree_pass(trees=root_only(torch.tensor([6, 7])), **options)
    for name in ("token_ids_T", "positions_T", "numbers_T", "request_T", "starts_B", "num_rows_B"):
        assert torch.equal(getattr(without, name), getattr(bare, name))


def test_tokens_are_found_through_their_blocks() -> None:
    table = torch.tensor([[3, 1, -1], [0, -1, 2]])
    tables = BlockTables(4, {None: table, 8: table.flip(1)})
    assert tables.slots(None, 0, torch.tensor([0, 3, 4, 7])).tolist() == [12, 15, 4, 7]
    assert tables.slots(None, 1, torch.tensor([1, 10])).tolist() == [1, 10]
    both = tables.slots(None, torch.tensor([1, 0]), torch.tensor([0, 5]))
    assert both.tolist() == [0, 5]
    assert tables.slots(8, 0, torch.tensor([4, 8])).tolist() == [4, 12]
    assert tables[torch.tensor([1])].slots(None, 0, torch.tensor([9])).tolist() == [9]


@pytest.mark.parametrize(("window", "number"), [(None, 8), (None, 11), (8, 3)])
def test_a_token_without_a_block_is_an_error(window: int | None, number: int) -> None:
    """Not a read of whatever lies at the end of the memory."""
    tables = BlockTables(4, {None: torch.tensor([[3, 1, -1]]), 8: torch.tensor([[-1, 1, 0]])})
    with pytest.raises(AssertionError, match="has no block"):
        tables.slots(window, 0, torch.tensor([5, number]))


def test_views_of_different_windows_use_their_own_tables() -> None:
    tables = BlockTables(2, {None: torch.tensor([[4, 5, 6]]), 2: torch.tensor([[-1, 0, 1]])})
    packed = FrontierPass(
        token_ids_T=torch.tensor([9]),
        positions_T=torch.tensor([4]),
        context_B=torch.tensor([4]),
        level=1,
        visible_BWS=torch.ones(1, 1, 1, dtype=torch.bool),
        tables=tables,
    )
    assert packed.view(None).write_slots_T.tolist() == [12]
    assert packed.view(2).write_slots_T.tolist() == [2]
    (segment,) = packed.view(2).segments()
    assert segment.key_slots_K.tolist() == [1, 2]
