"""What follows from a walk on the device: entries move to their places, and how far drafts reached.

Legend: B requests, N nodes of a tree with its root, L levels of a walk.
"""

import torch
from torch import Tensor

from fledge.engine.cache import PagedCache
from fledge.ops.accept import Walk
from fledge.ops.paged import TreePass
from fledge.ops.tree import TreeBatch, is_real


def compact_accepted(
    cache: PagedCache, packed: TreePass, nodes_BL: Tensor, lengths_B: Tensor
) -> None:
    """Put the accepted nodes' cache entries where their tokens belong, on the device alone.

    Of the first requests of the pass, as many as there are walks.
    """
    levels_L = torch.arange(nodes_BL.shape[1], device=nodes_BL.device).expand_as(nodes_BL)
    # Levels behind the accepted ones stay where they are.
    from_BL = torch.where(levels_L < lengths_B[:, None], nodes_BL, levels_L)
    requests_B = torch.arange(nodes_BL.shape[0], device=nodes_BL.device)
    requests_BL = requests_B[:, None].expand_as(levels_L)
    roots_B1 = packed.context_B[: nodes_BL.shape[0], None]
    cache.move(packed.tables, requests_BL, roots_B1 + from_BL, roots_B1 + levels_L)


def deepest_offered(trees: TreeBatch, walk: Walk) -> Tensor:
    """Depth of the deepest draft each walk was offered: one more than accepted if more hung there.

    int64 [B].
    """
    last_B1 = walk.nodes_BL.gather(1, walk.lengths_B[:, None] - 1)
    is_child_BN = (trees.parents_BN == last_B1) & is_real(trees)
    is_child_BN[:, 0] = False
    return walk.lengths_B - 1 + is_child_BN.any(dim=1)
