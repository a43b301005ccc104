"""Passes over paged memory for tests of kernels: made of a few numbers, on any device.

Blocks lie in random order. Slots that no row of a pass may look at hold NaN.

Legend: B requests, P blocks of a table, N nodes, W frontier nodes, S scratch entries.
"""

from collections.abc import Sequence as Many
from typing import NamedTuple

import torch

from fledge.ops.kv import KVPool
from fledge.ops.paged import BlockTables, FrontierPass, TreePass, make_tree_pass
from fledge.ops.tree import TreeBatch

BLOCK_SIZE = 16
CPU = torch.device("cpu")


class Heads(NamedTuple):
    query: int
    key: int
    size: int
    value_size: int | None = None


def block_tables(
    lens: Many[int], window: int | None, *, seed: int, device: torch.device
) -> BlockTables:
    """Tables for numbers below `lens`; a block more than any of them needs is not there."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // BLOCK_SIZE) for length in lens]
    blocks = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    table_BP = torch.full((len(lens), max(counts) + 1), -1)
    for request, count in enumerate(counts):
        table_BP[request, :count] = torch.tensor(blocks[:count])
        del blocks[:count]
    return BlockTables(BLOCK_SIZE, {window: table_BP.to(device)})


def random_trees(num_drafts: Many[int], *, seed: int, device: torch.device) -> TreeBatch:
    generator = torch.Generator().manual_seed(seed)
    width = max(num_drafts) + 1
    parents_BN = torch.zeros(len(num_drafts), width, dtype=torch.long)
    for request, count in enumerate(num_drafts):
        for node in range(1, count + 1):
            # Often the newest node, so that deep chains occur beside wide levels.
            draw = int(torch.randint(0, 2 * node, (1,), generator=generator))
            parents_BN[request, node] = min(draw, node - 1)
    return TreeBatch(
        tokens_BN=torch.zeros(len(num_drafts), width, dtype=torch.long, device=device),
        parents_BN=parents_BN.to(device),
        sizes_B=torch.tensor(num_drafts, device=device) + 1,
        logprobs_BN=torch.zeros(len(num_drafts), width, device=device),
        num_drafts=sum(num_drafts),
    )


def tree_pass(
    requests: Many[tuple[int, int, int]],
    window: int | None,
    *,
    first: int = 0,
    seed: int = 0,
    device: torch.device = CPU,
) -> TreePass:
    """Requests as (context, chain, drafts)."""
    contexts, chains, drafts = zip(*requests, strict=True)
    lens = [sum(one) for one in requests]
    trees = random_trees(drafts, seed=seed, device=device) if any(drafts) else None
    return make_tree_pass(
        chain_tokens_C=torch.zeros(sum(chains), dtype=torch.long, device=device),
        chain_B=torch.tensor(chains, device=device),
        context_B=torch.tensor(contexts, device=device),
        trees=trees,
        num_rows=sum(chains) + sum(drafts),
        tables=block_tables(lens, window, seed=seed, device=device),
        num_short=0,
        first_B=torch.tensor([min(first, context) for context in contexts], device=device),
    )


def frontier_pass(
    contexts: Many[int],
    width: int,
    level: int,
    window: int | None,
    *,
    first: int = 0,
    seed: int = 0,
    device: torch.device = CPU,
) -> FrontierPass:
    """Every node sees itself and a random half of the levels before it."""
    generator = torch.Generator().manual_seed(seed)
    older_BWS = torch.rand(len(contexts), width, width * (level - 1), generator=generator) < 0.5
    own_BWW = torch.eye(width, dtype=torch.bool).expand(len(contexts), -1, -1)
    context_B = torch.tensor(contexts, device=device)
    lens = [context + width * level for context in contexts]
    return FrontierPass(
        token_ids_T=torch.zeros(len(contexts) * width, dtype=torch.long, device=device),
        positions_T=(context_B + level - 1).repeat_interleave(width),
        context_B=context_B,
        level=level,
        visible_BWS=torch.cat([older_BWS, own_BWW], dim=2).to(device),
        tables=block_tables(lens, window, seed=seed, device=device),
        first_number=first,
    )


def filled_pool(
    packed: TreePass | FrontierPass, heads: Heads, window: int | None, *, dtype: torch.dtype
) -> KVPool:
    """Random keys and values at the slots that some row sees, NaN everywhere else."""
    table_BP = packed.paged(window).table_BP
    num_slots = (int(table_BP.max()) + 2) * packed.tables.block_size
    device = table_BP.device
    sizes = (heads.size, heads.size if heads.value_size is None else heads.value_size)
    rows = [torch.full((num_slots, heads.key, size), float("nan"), device=device) for size in sizes]
    slots = torch.cat([segment.key_slots_K for segment in packed.view(window).segments()])
    generator = torch.Generator(device=device).manual_seed(1)
    for one in rows:
        shape = (len(slots), *one.shape[1:])
        one[slots] = torch.randn(shape, generator=generator, device=device)
    pool = KVPool(num_slots)
    pool.write(0, torch.arange(num_slots, device=device), *(one.to(dtype) for one in rows))
    return pool
