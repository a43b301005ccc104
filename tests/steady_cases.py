"""Places of a batch for the kernels that begin and end a cycle, on any device."""

import torch

from fledge.ops.accept import Walk
from fledge.ops.paged import BlockTables
from fledge.ops.root_pass import Ends
from fledge.ops.settle import Standing
from fledge.ops.tree import TreeBatch
from tests.paged_cases import random_trees

BLOCK_SIZE, SPARE_ROW, LAST_POSITION = 4, 9, 50


def some_ends(size: int, num_lines: int, device: torch.device) -> tuple[Ends, BlockTables]:
    """The last place is empty, the one before it is longer than positions go."""
    generator = torch.Generator().manual_seed(size)
    num_blocks = 15
    table_RP = torch.randperm((SPARE_ROW + 1) * num_blocks, generator=generator)
    table_RP = table_RP.view(SPARE_ROW + 1, num_blocks)
    lens_B = torch.randint(2, 50, (size,), generator=generator)
    rows_B = torch.randperm(SPARE_ROW, generator=generator)[:size]
    fresh_B = torch.randint(1, num_lines + 1, (size,), generator=generator)
    tokens_MB = torch.randint(0, 99, (num_lines, size), generator=generator)
    rows_B[-1] = SPARE_ROW
    if size > 1:
        lens_B[-2] = LAST_POSITION + 6
    # As lines of one state: they begin anywhere in its memory.
    state_XB = torch.cat([torch.stack([rows_B, lens_B, fresh_B]), tokens_MB]).to(device)
    ends = Ends(state_XB[0], state_XB[1], state_XB[2], state_XB[3:])
    return ends, BlockTables(BLOCK_SIZE, {None: table_RP.to(device)})


def some_walk(sizes: list[int], device: torch.device) -> tuple[Walk, TreeBatch]:
    """Walks of all lengths down random trees; the second has failed."""
    trees = random_trees(sizes, seed=3, device=torch.device("cpu"))
    num_levels, parents = 5, trees.parents_BN.tolist()
    generator = torch.Generator().manual_seed(1)
    tokens_BL = torch.randint(0, 99, (len(sizes), num_levels), generator=generator)
    nodes, lengths = [], []
    for request, size in enumerate(sizes):
        node = int(torch.randint(0, size + 1, (), generator=generator))
        path = [node]
        while path[0]:
            path.insert(0, parents[request][path[0]])
        path = path[:num_levels]
        lengths.append(len(path))
        nodes.append(path + [path[-1]] * (num_levels - len(path)))
    failed_B = torch.arange(len(sizes)) == 1
    lengths_B = torch.tensor(lengths, device=device)
    walk = Walk(
        tokens_BL.to(device),
        torch.tensor(nodes, device=device),
        lengths_B,
        failed_B.to(device),
        logprobs=None,
    )
    moved = TreeBatch(
        tokens_BN=trees.tokens_BN.to(device),
        parents_BN=trees.parents_BN.to(device),
        sizes_B=trees.sizes_B.to(device),
        logprobs_BN=trees.logprobs_BN.to(device),
        num_drafts=trees.num_drafts,
    )
    return walk, moved


def some_standing(size: int, device: torch.device) -> Standing:
    ends, _ = some_ends(size, 7, device)
    said_B = torch.arange(size, device=device)
    facts_XB = torch.full((10, size), -1, device=device)
    return Standing(ends.rows_B, ends.lens_B, ends.fresh_B, said_B, ends.tokens_MB, facts_XB)
