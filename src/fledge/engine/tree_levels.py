"""Draft trees as they grow level by level: which nodes were scored, which are expanded next.

Legend: B requests, W tree width, C candidates of all levels.
"""

import torch

from fledge.ops.draft_level import Frontier, Level, Proposal, score_level
from fledge.ops.tree import Candidates


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
