"""Random passes over paged memory, and what every row of them sees, found one key at a time.

Requests have contexts of different lengths, chains, trees, and blocks strewn over the memory.
Blocks that no row may look at are not there, so looking at one is an error.
"""

import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from fledge.ops.paged import BlockTables, FrontierPass, TreePass, make_tree_pass
from tests.unit.ops.random_trees import PlainTree, batched, plain_trees

NUM_BLOCKS = 120


@dataclass(frozen=True)
class Row:
    """One row of a pass as the reference has it."""

    request: int
    token: int
    number: int
    position: int
    seen: list[int]
    """Numbers of the keys it sees."""


@dataclass(frozen=True)
class PagedCase:
    packed: TreePass | FrontierPass
    rows: list[Row]
    window: int | None
    block_size: int
    blocks: list[list[int]]

    def slot(self, request: int, number: int) -> int:
        block = self.blocks[request][number // self.block_size]
        return block * self.block_size + number % self.block_size

    def seen_slots(self, row: Row) -> set[int]:
        return {self.slot(row.request, number) for number in row.seen}


@dataclass(frozen=True)
class Chained:
    """What one request brings to a tree pass."""

    context: int
    first: int
    chain: list[int]
    tree: PlainTree


def tables_of(
    draw: st.DrawFn, size: int, window: int | None, lens: list[int], needed: list[int]
) -> tuple[BlockTables, list[list[int]]]:
    """Blocks for numbers below `lens`; those that lie wholly before what is needed are gone."""
    shuffled = random.Random(draw(st.integers(0, 99))).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    width = max(-(-length // size) for length in lens) + 1
    blocks = []
    for length, first in zip(lens, needed, strict=True):
        count = -(-length // size)
        row, shuffled = shuffled[:count], shuffled[count:]
        gone = first // size if window is not None else 0
        blocks.append([-1] * gone + row[gone:])
    table = torch.tensor([row + [-1] * (width - len(row)) for row in blocks])
    # A table of another window must not be looked at.
    return BlockTables(size, {window: table, 77: torch.full_like(table, -1)}), blocks


@st.composite
def chained(draw: st.DrawFn, has_trees: bool, last_token: int = 6) -> Chained:
    context = draw(st.integers(0, 14))
    chain = draw(st.lists(st.integers(0, last_token), min_size=1, max_size=4))
    tree = PlainTree([0], [0])
    if has_trees and draw(st.booleans()):
        tree = draw(plain_trees(max_nodes=7))
    tree = PlainTree([chain[-1], *tree.tokens[1:]], tree.parents)
    return Chained(context, draw(st.integers(0, min(2, context))), chain, tree)


def chained_rows(
    request: int, one: Chained, window: int | None, last_position: int | None
) -> list[Row]:
    root = one.context + len(one.chain) - 1
    tokens = [*one.chain, *one.tree.tokens[1:]]
    numbers = range(one.context, one.context + len(tokens))
    positions = {number: number for number in range(root + 1)}
    ancestors: dict[int, list[int]] = {}
    for node in range(1, len(one.tree.tokens)):
        path = one.tree.path(node)
        depth_position = root + len(path) - 1
        positions[root + node] = (
            depth_position if last_position is None else min(depth_position, last_position)
        )
        ancestors[root + node] = [root + above for above in path[1:]]
    rows = []
    for token, number in zip(tokens, numbers, strict=True):
        seen = [*range(one.first, min(number, root) + 1), *ancestors.get(number, [])]
        if window is not None:
            seen = [key for key in seen if positions[number] - positions[key] < window]
        rows.append(Row(request, token, number, positions[number], seen))
    return rows


@st.composite
def tree_passes(draw: st.DrawFn, *, min_requests: int = 1, all_short: bool = False) -> PagedCase:
    has_trees = draw(st.booleans())
    requests = draw(st.lists(chained(has_trees), min_size=min_requests, max_size=4))
    window = draw(st.sampled_from([None, None, 1, 2, 3, 5, 9]))
    size = draw(st.sampled_from([1, 3, 4]))
    ends = [one.context + len(one.chain) - 1 for one in requests]
    last_position = draw(st.sampled_from([None, max(ends), max(ends) + 1]))
    num_drafts = [len(one.tree.tokens) - 1 for one in requests]
    lens = [end + 1 + count for end, count in zip(ends, num_drafts, strict=True)]
    needed = [0 if window is None else max(0, one.context - window + 1) for one in requests]
    tables, blocks = tables_of(draw, size, window, lens, needed)
    packed = make_tree_pass(
        chain_tokens_C=torch.tensor([token for one in requests for token in one.chain]),
        chain_B=torch.tensor([len(one.chain) for one in requests]),
        context_B=torch.tensor([one.context for one in requests]),
        trees=batched([one.tree for one in requests], padding_token=5) if has_trees else None,
        num_rows=sum(len(one.chain) for one in requests) + sum(num_drafts),
        tables=tables,
        num_short=len(requests) if all_short else draw(st.integers(0, len(requests))),
        last_position=last_position,
        first_B=torch.tensor([one.first for one in requests]),
    )
    rows = [
        row
        for request, one in enumerate(requests)
        for row in chained_rows(request, one, window, last_position)
    ]
    return PagedCase(packed, rows, window, size, blocks)


@st.composite
def frontier_passes(draw: st.DrawFn, *, min_requests: int = 1) -> PagedCase:
    width, level = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    first = draw(st.integers(0, 1))
    contexts = draw(st.lists(st.integers(1, 14), min_size=min_requests, max_size=4))
    window = draw(st.sampled_from([None, None, 1, 2, 3, 5, 9]))
    size = draw(st.sampled_from([1, 3, 4]))
    num_scratch = width * level
    needed = [
        0 if window is None else min(context, max(0, context - window + level))
        for context in contexts
    ]
    tables, blocks = tables_of(draw, size, window, [c + num_scratch for c in contexts], needed)
    older = st.lists(st.booleans(), min_size=num_scratch - width, max_size=num_scratch - width)
    visible = torch.zeros(len(contexts), width, num_scratch, dtype=torch.bool)
    tokens = draw(
        st.lists(st.integers(0, 6), min_size=width * len(contexts), max_size=width * len(contexts))
    )
    rows = []
    for request, context in enumerate(contexts):
        for node in range(width):
            sees: list[bool] = [*draw(older), *(other == node for other in range(width))]
            visible[request, node] = torch.tensor(sees)
            position = context + level - 1
            seen = [
                *(key for key in range(first, context)),
                *(context + entry for entry, is_seen in enumerate(sees) if is_seen),
            ]
            if window is not None:
                seen = [
                    key
                    for key in seen
                    if position - (key if key < context else context + (key - context) // width)
                    < window
                ]
            number = context + num_scratch - width + node
            rows.append(Row(request, tokens[len(rows)], number, position, seen))
    packed = FrontierPass(
        token_ids_T=torch.tensor(tokens),
        positions_T=torch.tensor([row.position for row in rows]),
        context_B=torch.tensor(contexts),
        level=level,
        visible_BWS=visible,
        tables=tables,
        first_number=first,
    )
    return PagedCase(packed, rows, window, size, blocks)


def random_rows(count: int, *shape: int, seed: int) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))
