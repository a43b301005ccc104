"""Paged attention by one kernel against the plain loop over requests, in Triton's interpreter.

The regimes that break: no context, one key, no tree, trees of 1 and 64 drafts, every head size, odd
groups, windows that end inside a tree, requests of very different lengths, keys just before, at
and behind the border of a block, keys split over programs. Memory that nobody may read holds NaN.

float16 and float32 only: the interpreter's products of bfloat16 are wrong. On a GPU the tests of
tests/gpu take their place.
"""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.models.attention import attend_packed
from fledge.ops.attention import AttentionSpec, attend_plain
from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.kv import KVPool
from fledge.ops.paged import FrontierPass, TreePass
from fledge.ops.paged_shape import paged_shape
from tests.paged_cases import BLOCK_SIZE, Heads, filled_pool, frontier_pass, tree_pass
from tests.unit.ops.random_passes import PagedCase, frontier_passes, tree_passes

paged_attention_triton = pytest.importorskip("fledge.ops.paged_attention_triton")
attend_paged = paged_attention_triton.attend_paged
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")


@dataclass(frozen=True)
class Case:
    """Requests of a pass: (context, chain, drafts), or contexts alone for a frontier."""

    requests: tuple[tuple[int, int, int], ...]
    heads: Heads = Heads(4, 2, 16)
    window: int | None = None
    first: int = 0
    dtype: torch.dtype = torch.float32
    soft_cap: float | None = None
    has_sinks: bool = False


SMALL = ((5, 1, 3), (20, 1, 0), (0, 4, 0))
TREES = {
    "one token and nothing before it": Case(((0, 1, 0),)),
    "context 1": Case(((1, 1, 0), (1, 1, 1))),
    "no trees": Case(((17, 1, 0), (3, 1, 0)), dtype=torch.float16),
    "64 drafts": Case(((40, 1, 64),), Heads(2, 1, 16)),
    "a tree, a chunk, one token": Case(((30, 1, 12), (9, 40, 0), (0, 1, 0)), dtype=torch.float16),
    "a chain with a tree below it": Case(((21, 7, 9), (0, 3, 5))),
    "short beside long": Case(((250, 1, 2), (0, 1, 0), (2, 1, 1))),
    "before a border": Case(((15, 1, 0), (14, 1, 1), (31, 1, 0))),
    "at and behind a border": Case(((16, 1, 0), (17, 1, 3), (32, 1, 1))),
    "split keys": Case(((520, 1, 3),), Heads(2, 1, 64), dtype=torch.float16),
    "heads of 64": Case(SMALL, Heads(3, 1, 64), dtype=torch.float16),
    "heads of 96": Case(SMALL, Heads(4, 2, 96)),
    "heads of 128": Case(SMALL, Heads(5, 1, 128), dtype=torch.float16),
    "heads of 256": Case(SMALL, Heads(2, 1, 256)),
    "one head for each": Case(SMALL, Heads(3, 3, 16)),
    "seven to one": Case(SMALL, Heads(7, 1, 16)),
    "more heads than a tile": Case(((7, 1, 2),), Heads(20, 1, 16)),
    "values narrower than keys": Case(SMALL, Heads(4, 2, 24, 16)),
    "window of 1": Case(SMALL, window=1),
    "window that ends in a tree": Case(((30, 1, 12), (2, 1, 3)), window=3),
    "window in a chunk": Case(((50, 20, 0), (4, 1, 0)), window=9, dtype=torch.float16),
    "window wider than all": Case(SMALL, window=500),
    "no entry for token 0": Case(((1, 2, 0), (18, 1, 4)), first=1),
    "soft cap": Case(SMALL, soft_cap=2.0),
    "sinks": Case(SMALL, has_sinks=True),
    "sinks and split keys": Case(((300, 1, 0), (255, 1, 0)), Heads(2, 1, 16), has_sinks=True),
    "everything": Case(((200, 1, 5), (3, 9, 0)), Heads(3, 1, 96), 40, 1, torch.float16, 3.0, True),
}
FRONTIERS = {
    "first level": (Case(((5, 2, 1), (40, 2, 1))), 2, 1),
    "third level": (Case(((1, 0, 0), (33, 0, 0)), Heads(3, 1, 64), first=1), 3, 3),
    "window": (Case(((30, 0, 0), (2, 0, 0)), window=5), 2, 4),
    "window past the context": (Case(((30, 0, 0),), window=2, dtype=torch.float16), 2, 4),
    "split keys": (Case(((280, 0, 0),), Heads(4, 1, 32), dtype=torch.float16), 4, 2),
}


def spec_of(case: Case) -> AttentionSpec:
    heads = case.heads
    sinks_H = torch.linspace(-2, 3, heads.query).to(case.dtype) if case.has_sinks else None
    return AttentionSpec(heads.size**-0.5, case.window, case.soft_cap, sinks_H)


def attend(packed: TreePass | FrontierPass, case: Case) -> tuple[Tensor, Tensor]:
    """The kernel's answer in the given precision, and the plain one in float32."""
    heads, spec = case.heads, spec_of(case)
    pool = filled_pool(packed, heads, case.window, dtype=case.dtype)
    generator = torch.Generator().manual_seed(3)
    # As models bring them: heads first, rows second in memory.
    query_HTD = torch.randn(heads.query, packed.num_tokens, heads.size, generator=generator)
    query_THD = query_HTD.to(case.dtype).transpose(0, 1)
    slots_T = packed.view(case.window).write_slots_T
    with choose_kernels("triton"):
        got = attend_packed(packed, pool, 0, query_THD, *pool.read(0, slots_T), spec)
    if spec.sinks_H is not None:
        spec = replace(spec, sinks_H=spec.sinks_H.float())
    return got, plain(packed, pool, query_THD, spec)


def plain(
    packed: TreePass | FrontierPass, pool: KVPool, query_THD: Tensor, spec: AttentionSpec
) -> Tensor:
    outputs = []
    for segment in packed.view(spec.window).segments():
        keys, values = (one.float() for one in pool.read(0, segment.key_slots_K))
        outputs.append(attend_plain(query_THD[segment.rows].float(), keys, values, segment, spec))
    return torch.cat(outputs)


def check(packed: TreePass | FrontierPass, case: Case) -> None:
    got, wanted = attend(packed, case)
    assert got.dtype == case.dtype
    tolerance = 1e-5 if case.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", TREES)
def test_trees_and_chunks(name: str) -> None:
    case = TREES[name]
    check(tree_pass(case.requests, case.window, first=case.first), case)


@pytest.mark.parametrize(
    "name",
    [
        "no trees",
        "a tree, a chunk, one token",
        "a chain with a tree below it",
        "sinks and split keys",
        "everything",
    ],
)
def test_requests_with_programs_of_their_own(name: str) -> None:
    """As in decoding cycles; a request with more rows than others still gets them all."""
    case = TREES[name]
    packed = tree_pass(case.requests, case.window, first=case.first)
    short = replace(packed, num_short=len(case.requests), views={})
    assert short.paged(case.window).is_short
    check(short, case)


def test_counts_of_arrivals_are_zero_again() -> None:
    """Else the next launch would join parts before all are there."""
    counts = torch.zeros(16_384, dtype=torch.int32)
    case = TREES["split keys"]
    packed = tree_pass(case.requests, None)
    pool = filled_pool(packed, case.heads, None, dtype=case.dtype)
    query_THD = torch.randn(packed.num_tokens, 2, 64).to(case.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention_triton, "counts_for", lambda device: counts.to(device))
        first, second = (
            attend_paged(packed.paged(None), query_THD, *pool.layer(0), spec_of(case))
            for _ in range(2)
        )
    assert counts.eq(0).all()
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", FRONTIERS)
def test_frontiers(name: str) -> None:
    case, width, level = FRONTIERS[name]
    contexts = [context for context, _, _ in case.requests]
    check(frontier_pass(contexts, width, level, case.window, first=case.first), case)


@pytest.mark.parametrize(
    ("num_requests", "rows", "group", "size", "dtype", "tile"),
    [
        (1, 1, 1, 64, torch.bfloat16, 16),
        (1, 1, 24, 64, torch.bfloat16, 32),
        (8, 65, 4, 128, torch.bfloat16, 128),
        (8, 65, 4, 256, torch.bfloat16, 64),
        (8, 65, 4, 128, torch.float32, 32),
        (1, 2048, 3, 256, torch.float32, 16),
    ],
)
def test_tiles_fit_rows_and_heads(
    num_requests: int, rows: int, group: int, size: int, dtype: torch.dtype, tile: int
) -> None:
    packed = tree_pass([(40, rows, 0)] * num_requests, None)
    shape = paged_shape(packed.paged(None), group=group, num_groups=2, head_size=size, dtype=dtype)
    assert shape.tile == tile
    assert shape.num_tiles * (tile // group) >= num_requests * rows
    assert shape.num_splits >= 1


def test_long_contexts_of_few_rows_are_split() -> None:
    packed = tree_pass([(1000, 1, 0)], None)
    rows = packed.paged(None)
    split = paged_shape(rows, group=4, num_groups=1, head_size=64, dtype=torch.bfloat16)
    assert split.num_splits == split.num_parts
    assert split.num_parts == -(-(rows.table_BP.shape[1] * BLOCK_SIZE) // split.segment)
    many = tree_pass([(1000, 1, 0)] * 64, None).paged(None)
    whole = paged_shape(many, group=4, num_groups=1, head_size=64, dtype=torch.bfloat16)
    assert whole.num_splits == 1


def test_another_kernel_joins_the_parts_of_long_contexts_only() -> None:
    for tokens, is_long in ((12_288, False), (12_289, True)):
        rows = tree_pass([(40, 6, 0)], None).paged(None)
        rows = replace(rows, table_BP=torch.zeros(1, -(-tokens // rows.block_size)))
        shape = paged_shape(rows, group=4, num_groups=1, head_size=64, dtype=torch.bfloat16)
        assert (shape.joins, shape.is_parted) == (not is_long, is_long)
        many = replace(rows, context_B=torch.zeros(64), positions_T=torch.zeros(384))
        shape = paged_shape(many, group=4, num_groups=1, head_size=64, dtype=torch.bfloat16)
        assert (shape.num_splits, shape.is_parted) == (1, False)


@given(st.one_of(tree_passes(), frontier_passes()))
@settings(max_examples=15)
def test_small_passes_with_blocks_that_are_gone(case: PagedCase) -> None:
    """Blocks of any size; looking at one that a window let go of reads other memory."""
    heads = Heads(3, 1, 8)
    pool = filled_pool(case.packed, heads, case.window, dtype=torch.float32)
    query_THD = torch.randn(len(case.rows), 3, 8, generator=torch.Generator().manual_seed(1))
    spec = AttentionSpec(scale=0.3, window=case.window)
    keys, values = pool.layer(0)
    got = attend_paged(case.packed.paged(case.window), query_THD, keys, values, spec)
    wanted = plain(case.packed, pool, query_THD, spec)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_random_passes() -> None:
    rng = random.Random(5)
    for _ in range(3):
        requests = [
            (rng.randrange(60), rng.choice([1, 1, 1, 5]), rng.randrange(9)) for _ in range(3)
        ]
        window = rng.choice([None, 4, 17])
        case = Case(tuple(requests), Heads(6, 2, 32), window, dtype=torch.float16)
        check(tree_pass(requests, window, seed=rng.randrange(99)), case)
