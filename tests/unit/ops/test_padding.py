"""Many short requests attended in one call give what each gives alone.

Catches: a row or key of the padding that counts, a mask taken from another request, a window of
a tree off by one, and padding that reads memory nobody has written.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.models.attention import attend_packed
from fledge.ops.attention import AttentionSpec, attend_padded, attend_plain
from fledge.ops.kv import KVPool
from fledge.ops.paged import BlockTables, TreePass, make_tree_pass
from tests.unit.ops.random_passes import (
    NUM_BLOCKS,
    PagedCase,
    frontier_passes,
    random_rows,
    tree_passes,
)

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8


def filled_pool(case: PagedCase) -> KVPool:
    """Numbers where the case's requests have tokens, and nothing that is a number elsewhere."""
    num_slots = NUM_BLOCKS * case.block_size
    keys = torch.full((num_slots, KEY_HEADS, HEAD_DIM), float("nan"))
    values = keys.clone()
    for request, blocks in enumerate(case.blocks):
        numbers = [row.number for row in case.rows if row.request == request]
        there = [n for n in range(max(numbers) + 1) if blocks[n // case.block_size] >= 0]
        slots = torch.tensor([case.slot(request, number) for number in there])
        keys[slots] = random_rows(len(slots), KEY_HEADS, HEAD_DIM, seed=request)
        values[slots] = random_rows(len(slots), KEY_HEADS, HEAD_DIM, seed=100 + request)
    pool = KVPool(num_slots)
    pool.write(0, torch.arange(num_slots), keys, values)
    return pool


def attend_row(case: PagedCase, pool: KVPool, row_id: int, query_HD: Tensor) -> Tensor:
    """One row over the keys the reference says it sees."""
    slots = torch.tensor(sorted(case.seen_slots(case.rows[row_id])))
    keys, values = pool.read(0, slots)
    keys = keys.repeat_interleave(HEADS // KEY_HEADS, dim=1)
    values = values.repeat_interleave(HEADS // KEY_HEADS, dim=1)
    scores_HK = torch.einsum("hd,khd->hk", query_HD, keys) * 0.3
    return torch.einsum("hk,khd->hd", scores_HK.softmax(dim=-1), values)


def check_padded(case: PagedCase) -> None:
    view = case.packed.view(case.window)
    padded = view.padded
    assert padded is not None
    num_rows = padded.place_T[0].shape[0]
    for row_id in range(num_rows):
        request, q = (int(place[row_id]) for place in padded.place_T)
        seen = padded.slots_BK[request, padded.mask_BQK[request, q]].tolist()
        assert len(seen) == len(set(seen))
        assert set(seen) == case.seen_slots(case.rows[row_id])
        assert int(padded.rows_BQ[request, q]) == row_id
    pool = filled_pool(case)
    spec = AttentionSpec(scale=0.3, window=case.window)
    query = random_rows(len(case.rows), HEADS, HEAD_DIM, seed=7)
    keys, values = pool.read(0, padded.slots_BK)
    assert not keys.isnan().any(), "padding reads what nobody has written"
    got = attend_padded(query, keys, values, padded, spec)
    assert got.shape[0] == num_rows
    for segment in view.segments():
        if segment.start < num_rows:
            one = attend_plain(
                query[segment.rows], *pool.read(0, segment.key_slots_K), segment, spec
            )
            torch.testing.assert_close(got[segment.rows], one, rtol=1e-5, atol=1e-5)
    for row_id in range(num_rows):
        alone = attend_row(case, pool, row_id, query[row_id])
        torch.testing.assert_close(got[row_id], alone, rtol=1e-5, atol=1e-5)


@given(tree_passes(min_requests=2, all_short=True))
@settings(max_examples=100)
def test_padded_trees_see_what_each_sees_alone(case: PagedCase) -> None:
    check_padded(case)


@given(frontier_passes(min_requests=2))
@settings(max_examples=50)
def test_padded_frontiers_see_what_each_sees_alone(case: PagedCase) -> None:
    check_padded(case)


@given(tree_passes(min_requests=3))
@settings(max_examples=40)
def test_short_requests_together_and_long_ones_one_by_one(case: PagedCase) -> None:
    """Only the first `num_short` are padded; the pass has the rows of all of them in order."""
    packed = case.packed
    assert isinstance(packed, TreePass)
    padded = packed.view(case.window).padded
    assert (padded is None) == (packed.num_short < 2)
    if padded is not None:
        assert padded.rows_BQ.shape[0] == packed.num_short
        wanted = [i for i, row in enumerate(case.rows) if row.request < packed.num_short]
        assert padded.place_T[0].shape[0] == len(wanted)
        check_padded(case)
    pool = filled_pool(case)
    spec = AttentionSpec(scale=0.3, window=case.window)
    query = random_rows(len(case.rows), HEADS, HEAD_DIM, seed=7)
    slots = packed.view(case.window).write_slots_T
    got = attend_packed(packed, pool, 0, query, *pool.read(0, slots), spec)
    for row_id in range(len(case.rows)):
        alone = attend_row(case, pool, row_id, query[row_id])
        torch.testing.assert_close(got[row_id], alone, rtol=1e-5, atol=1e-5)


@given(tree_passes(min_requests=2, all_short=True), st.sampled_from(["soft_cap", "sinks_H"]))
@settings(max_examples=20)
def test_layers_that_cannot_be_padded_go_one_by_one(case: PagedCase, feature: str) -> None:
    pool = filled_pool(case)
    value = 2.0 if feature == "soft_cap" else torch.tensor([0.1, -1.0, 2.0, 0.0])
    spec = AttentionSpec(scale=0.3, window=case.window, **{feature: value})
    query = random_rows(len(case.rows), HEADS, HEAD_DIM, seed=7)
    view = case.packed.view(case.window)
    got = attend_packed(case.packed, pool, 0, query, *pool.read(0, view.write_slots_T), spec)
    for segment in view.segments():
        one = attend_plain(query[segment.rows], *pool.read(0, segment.key_slots_K), segment, spec)
        torch.testing.assert_close(got[segment.rows], one, rtol=1e-5, atol=1e-5)


def pass_of(contexts: list[int]) -> TreePass:
    table = torch.arange(len(contexts)).expand(1, -1).T.contiguous()
    return make_tree_pass(
        chain_tokens_C=torch.zeros(len(contexts), dtype=torch.long),
        chain_B=torch.ones(len(contexts), dtype=torch.long),
        context_B=torch.tensor(contexts),
        trees=None,
        num_rows=len(contexts),
        tables=BlockTables(100_000, {None: table, 10: table}),
        num_short=len(contexts),
    )


def test_one_long_context_is_not_padded_onto_many_short_ones() -> None:
    """Thirty keys each beside 50,000: padding would be nearly all of the work."""
    assert pass_of([30] * 16).view(None).padded is not None
    assert pass_of([30] * 16 + [50_000]).view(None).padded is None
    assert pass_of([30] * 16 + [50_000]).view(10).padded is not None, "a window makes them alike"
    assert pass_of([30]).view(None).padded is None, "one alone needs no padding"
