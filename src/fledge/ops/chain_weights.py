"""How much a guess counts in the loss: as much as serving gets to see of it.

Serving sees a guess when all guesses of its chain before it were accepted, and when a chain began
at its index at all. One begins where the one before ended: behind the first guess that was not
accepted, or behind its last. So of n accepted guesses at index s the next chain begins at s+n+1,
and how likely a chain begins at an index follows from those before it in the document.

    guesses accepted from s     0     1     2    ...    K
    the next chain begins at   s+1   s+2   s+3         s+K+1

Where the first chain began is unknown: it is taken to be equally likely everywhere, and forgotten
after a few chains. Weights are about 1 in the mean of a long answer. Its first tokens count more,
up to K+1 over the mean length of chains: those that come from before it were all K+1 long.

Legend: T indices, R rows with a label, K draft steps, J = K+1 ways a chain may end.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_CHAINS = 3
"""Chains that are followed until their beginnings are far from uniform."""


@dataclass(frozen=True, slots=True)
class ChainWeights:
    """Guesses by those before them; indices by where chains begin, as far as `start_share`."""

    start_share: float = 0.0

    def of(self, accepted_TK: Tensor, first_rows_T: Tensor, index_RK: Tensor) -> Tensor:
        """Of each row at each step.

        `accepted_TK` has what is accepted at each index, 1 where nothing is asked, and a row more
        for rows that no index is asked for; `first_rows_T` tells documents apart.
        """
        reached_TJ = F.pad(accepted_TK, (1, 0), value=1.0).cumprod(dim=1)
        weights_TK = reached_TJ[:, :-1]
        if self.start_share:
            starts_T = start_weights(reached_TJ[:-1], first_rows_T)
            weighed_T = 1 - self.start_share + self.start_share * starts_T
            weights_TK = weights_TK * F.pad(weighed_T, (0, 1), value=1.0)[:, None]
        return weights_TK.gather(0, index_RK)


def start_weights(reached_TJ: Tensor, first_rows_T: Tensor) -> Tensor:
    """How likely a chain begins at each index, times the mean length of chains.

    `reached_TJ` is how likely so many guesses or more are accepted. Indices before a document count
    as those whose guesses are all accepted.
    """
    num_indices, num_ends = reached_TJ.shape
    ended_TJ = reached_TJ - F.pad(reached_TJ[:, 1:], (0, 1))
    ends_J = torch.arange(num_ends, device=reached_TJ.device)
    from_TJ = torch.arange(num_indices, device=reached_TJ.device)[:, None] - 1 - ends_J
    is_before_TJ = from_TJ < 0
    from_TJ = from_TJ.clamp(min=0)
    is_before_TJ = is_before_TJ | (first_rows_T[from_TJ] != first_rows_T[:, None])
    last_J = (ends_J == num_ends - 1).to(ended_TJ.dtype)
    came_TJ = torch.where(is_before_TJ, last_J, ended_TJ[from_TJ, ends_J])
    starts_T = torch.ones_like(reached_TJ[:, 0])
    for _ in range(_CHAINS):
        starts_T = (came_TJ * torch.where(is_before_TJ, 1.0, starts_T[from_TJ])).sum(dim=1)
    return starts_T
