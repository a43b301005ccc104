"""What follows from a walk on the device: entries move to their places.

Legend: B requests, L levels of a walk.
"""

import torch
from torch import Tensor

from fledge.engine.cache import PagedCache
from fledge.ops.paged import TreePass


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
