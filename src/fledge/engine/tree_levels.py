"""Growing draft trees level by level: which nodes were scored, which are expanded next.

Level 1 holds the W best children of the root. Each further level scores W children of each of W
frontier nodes and expands the W most probable of those W x W paths; any of them may end in the
tree.

Legend: B requests, W tree width, C candidates of a level, S scratch entries of the head's cache.
"""

import torch
from torch import Tensor

from fledge.ops.tree import Candidates


class TreeLevels:
    """Candidates of all levels, and which of the newest ones are expanded next."""

    frontier_tokens_BW: Tensor
    frontier_rows_BW: Tensor
    """Row of each frontier node's parent in the head pass that proposed it."""

    visible_BWS: Tensor
    """Which scratch entries each frontier node sees: its ancestors and itself."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._num_candidates = 0
        self._frontier_BW: Tensor

    def add_first(self, tokens_BW: Tensor, logprobs_BW: Tensor, calibrated_BW: Tensor) -> None:
        """Children of the roots; all of them are expanded."""
        num_requests = tokens_BW.shape[0]
        self._record(tokens_BW, calibrated_BW, logprobs_BW, torch.full_like(tokens_BW, -1))
        self._scores_BW = calibrated_BW
        self.frontier_tokens_BW = tokens_BW
        self._frontier_BW = torch.arange(self._width, device=tokens_BW.device).repeat(
            num_requests, 1
        )
        own_WW = torch.eye(self._width, dtype=torch.bool, device=tokens_BW.device)
        self.visible_BWS = own_WW.repeat(num_requests, 1, 1)

    def add(self, tokens_BWC: Tensor, logprobs_BWC: Tensor, calibrated_BWC: Tensor) -> None:
        """Children of the frontier; the most probable ones are expanded next."""
        num_requests, width, _ = tokens_BWC.shape
        scores_BC = (self._scores_BW[:, :, None] + calibrated_BWC).flatten(1)
        tokens_BC = tokens_BWC.flatten(1)
        parents_BC = self._frontier_BW.repeat_interleave(width, dim=1)
        first = self._num_candidates
        self._record(tokens_BC, scores_BC, logprobs_BWC.flatten(1), parents_BC)
        best = scores_BC.sort(dim=1, descending=True, stable=True)
        chosen_BW = best.indices[:, :width]
        self._scores_BW = best.values[:, :width]
        self.frontier_tokens_BW = tokens_BC.gather(1, chosen_BW)
        self.frontier_rows_BW = chosen_BW // width
        self._frontier_BW = chosen_BW + first
        rows_BWS = self.frontier_rows_BW[:, :, None].expand(-1, -1, self.visible_BWS.shape[-1])
        own_BWW = torch.eye(width, dtype=torch.bool, device=tokens_BC.device).repeat(
            num_requests, 1, 1
        )
        self.visible_BWS = torch.cat([self.visible_BWS.gather(1, rows_BWS), own_BWW], dim=2)

    def _record(self, tokens: Tensor, scores: Tensor, logprobs: Tensor, parents: Tensor) -> None:
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._logprobs.append(logprobs)
        self._parents.append(parents)
        self._num_candidates += tokens.shape[1]

    def candidates(self) -> Candidates:
        return Candidates(
            tokens_BC=torch.cat(self._tokens, dim=1),
            scores_BC=torch.cat(self._scores, dim=1),
            logprobs_BC=torch.cat(self._logprobs, dim=1),
            parents_BC=torch.cat(self._parents, dim=1),
        )
