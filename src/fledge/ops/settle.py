"""What follows from a walk for those who go on: where they stand now, and what the host will read.

Legend: B places, N nodes of a tree with its root, L levels of a walk, M tokens a place has lines
for, X lines of the facts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.accept import Walk
from fledge.ops.kernel_choice import needs_check, on_device, run_kernel, uses_kernels
from fledge.ops.tree import TreeBatch, is_real

FIRST_TOKEN = 4
"""Line of the facts where what was said begins."""


class Standing(NamedTuple):
    """Memory that says where requests stand, a column each; it is written in place."""

    rows_B: Tensor
    """Rows of the block tables; the spare one for places without a request."""

    lens_B: Tensor
    fresh_B: Tensor
    said_B: Tensor
    tokens_MB: Tensor
    """What was said last, level by level."""

    facts_XB: Tensor
    """Tokens said, depth of the deepest draft offered, whether logits were no numbers, whether the
    drafts were copied; then the tokens, level by level."""


def settle(walk: Walk, trees: TreeBatch, standing: Standing, spare_row: int) -> None:
    """Requests have said what their walks say; the lengths of empty places stay as they are."""
    if not uses_kernels(standing.lens_B):
        settle_plain(walk, trees, standing, spare_row)
        return
    name, kind = "what follows from walks", (trees.max_size, walk.tokens_BL.shape[1])
    before = _copy(standing) if needs_check(name, kind) else None

    def plain() -> None:
        if before is not None:  # the kernel has written already, and was wrong
            for memory, was in zip(standing, before, strict=True):
                memory.copy_(was)
        settle_plain(walk, trees, standing, spare_row)

    def fused() -> None:
        from fledge.ops.settle_triton import settle_places

        with on_device(standing.lens_B):
            settle_places(walk, trees, standing, spare_row)

    def is_right(_: None) -> bool:
        assert before is not None
        expected = _copy(before)
        settle_plain(walk, trees, expected, spare_row)
        return all(map(torch.equal, standing, expected))

    run_kernel(name, fused, plain, kind=kind, is_right=is_right)


def settle_plain(walk: Walk, trees: TreeBatch, standing: Standing, spare_row: int) -> None:
    num_levels, lengths_B = walk.tokens_BL.shape[1], walk.lengths_B
    standing.facts_XB[0].copy_(lengths_B)
    standing.facts_XB[1].copy_(deepest_offered(trees, walk))
    standing.facts_XB[2].copy_(walk.failed_B)
    is_copied_B = trees.is_copied_B
    standing.facts_XB[3].copy_(walk.failed_B & False if is_copied_B is None else is_copied_B)
    standing.facts_XB[FIRST_TOKEN : FIRST_TOKEN + num_levels].copy_(walk.tokens_BL.t())
    is_empty_B = standing.rows_B == spare_row
    standing.lens_B.add_(lengths_B.masked_fill(is_empty_B, 0))
    standing.said_B.add_(lengths_B)
    standing.fresh_B.copy_(lengths_B.masked_fill(is_empty_B, 1))
    standing.tokens_MB[:num_levels].copy_(walk.tokens_BL.t())


def deepest_offered(trees: TreeBatch, walk: Walk) -> Tensor:
    """Depth of the deepest draft each walk was offered: one more than accepted if more hung there.

    int64 [B].
    """
    last_B1 = walk.nodes_BL.gather(1, walk.lengths_B[:, None] - 1)
    is_child_BN = (trees.parents_BN == last_B1) & is_real(trees)
    is_child_BN[:, 0] = False
    return walk.lengths_B - 1 + is_child_BN.any(dim=1)


def _copy(standing: Standing) -> Standing:
    return Standing(*(memory.clone() for memory in standing))
