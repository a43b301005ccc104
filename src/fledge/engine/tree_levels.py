"""Draft trees as they grow level by level: which nodes were scored, which are expanded next.

Legend: B requests, W tree width, C candidates of all levels, N nodes of a tree with its root.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fledge.engine.draft_passes import own_numbers
from fledge.ops.draft_level import Frontier, Level, Proposal, score_level
from fledge.ops.tree import Candidates, TreeBatch


class TreeLevels:
    """Candidates of all levels, and which of the newest ones are expanded next."""

    def __init__(self) -> None:
        self._levels: list[Level] = []
        self._num_candidates = 0

    @property
    def frontier(self) -> Frontier:
        return self._levels[-1].frontier

    def add(self, proposal: Proposal) -> None:
        """Children of the roots first, then of the frontier; the most probable ones are next."""
        above = self.frontier if self._levels else None
        level = score_level(proposal, above, self._num_candidates)
        self._levels.append(level)
        self._num_candidates += level.tokens_BC.shape[1]

    def candidates(self) -> Candidates:
        tokens, scores, logprobs, parents, _ = zip(*self._levels, strict=True)
        return Candidates(
            tokens_BC=torch.cat(tokens, dim=1),
            scores_BC=torch.cat(scores, dim=1),
            logprobs_BC=torch.cat(logprobs, dim=1),
            parents_BC=torch.cat(parents, dim=1),
        )


def come_last(candidates: Candidates, is_drafted_B: Tensor) -> Candidates:
    """In the choice of nodes only padding is left to requests that are not drafted for."""
    scores_BC = candidates.scores_BC.masked_fill(~is_drafted_B[:, None], float("-inf"))
    return replace(candidates, scores_BC=scores_BC)


def have_no_drafts(trees: TreeBatch, is_drafted_B: Tensor) -> TreeBatch:
    """Nodes below themselves are below nobody: what is left to these requests is no draft."""
    own_N = own_numbers(trees.max_size, is_drafted_B.device)
    parents_BN = torch.where(is_drafted_B[:, None], trees.parents_BN, own_N)
    return replace(trees, parents_BN=parents_BN)
