"""Draft trees of a batch as arrays. Pure functions; the root is node 0, parents come first.

    tree          tokens  [r a b c d]      ancestors (row sees column)   path to d
      r           parents [0 0 0 1 1]      r 1 0 0 0 0                   r -> a -> d
     / \\          depths  [0 1 1 2 2]      a 1 1 0 0 0
    a   b                                  b 1 0 1 0 0
   / \\                                     c 1 1 0 1 0
  c   d                                    d 1 1 0 0 1

Trees of a batch share one width N; `sizes` says how many nodes are real. Nodes behind the real ones
are padding: they hang below the root, are verified by nobody and match no token.

Legend: B requests, N nodes with the root, C candidates, W tree width, V draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """One draft tree per request."""

    tokens_BN: Tensor
    """Target token ids; column 0 is the last committed token."""

    parents_BN: Tensor
    """Index of each node's parent, smaller than its own; 0 for the root itself."""

    sizes: tuple[int, ...]
    """Real nodes of each tree, root included."""

    @property
    def num_requests(self) -> int:
        return self.tokens_BN.shape[0]

    @property
    def max_size(self) -> int:
        return self.tokens_BN.shape[1]


def root_only(root_tokens_B: Tensor) -> TreeBatch:
    """Trees without drafts: verifying them is plain decoding."""
    return TreeBatch(
        tokens_BN=root_tokens_B[:, None],
        parents_BN=torch.zeros_like(root_tokens_B)[:, None],
        sizes=(1,) * root_tokens_B.shape[0],
    )


def is_real(tree: TreeBatch) -> Tensor:
    """Boolean [B, N]: which nodes are not padding."""
    sizes_B = torch.tensor(tree.sizes, device=tree.tokens_BN.device)
    return torch.arange(tree.max_size, device=sizes_B.device) < sizes_B[:, None]


def ancestors(parents_BN: Tensor) -> Tensor:
    """Boolean [B, N, N]: column is the row's node itself or above it."""
    num_nodes = parents_BN.shape[1]
    seen_BNN = torch.eye(num_nodes, dtype=torch.bool, device=parents_BN.device).repeat(
        parents_BN.shape[0], 1, 1
    )
    # Pointer doubling: after i rounds a row has seen 2**i generations; log2(N) rounds are enough.
    jump_BN = parents_BN
    for _ in range(max(1, (num_nodes - 1).bit_length())):
        seen_BNN = seen_BNN | seen_BNN.gather(1, jump_BN[:, :, None].expand_as(seen_BNN))
        jump_BN = jump_BN.gather(1, jump_BN)
    return seen_BNN


def depths(parents_BN: Tensor) -> Tensor:
    """Edges between the root and each node, int64 [B, N]."""
    return ancestors(parents_BN).sum(dim=-1) - 1


def match_child(tree: TreeBatch, real_BN: Tensor, node_B: Tensor, token_B: Tensor) -> Tensor:
    """The child of each node that holds the token, or 0 (the root, nobody's child) for none."""
    match_BN = (tree.parents_BN == node_B[:, None]) & (tree.tokens_BN == token_B[:, None]) & real_BN
    match_BN[:, 0] = False
    return match_BN.int().argmax(dim=1) * match_BN.any(dim=1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every node that drafting scored, parents before children, root not included."""

    tokens_BC: Tensor
    scores_BC: Tensor
    """Cumulative log-probability of the path; a child never scores above its parent."""

    parents_BC: Tensor
    """Index of the parent among the candidates, -1 below the root."""


def rerank(root_tokens_B: Tensor, candidates: Candidates, budget: int) -> TreeBatch:
    """The tree of the `budget` most probable candidates.

    A stable sort keeps it closed under parents: a parent scores at least as much as its child and
    comes first, so a tie between the two goes to the parent.
    """
    budget = min(budget, candidates.scores_BC.shape[1])
    order_BC = candidates.scores_BC.sort(dim=1, descending=True, stable=True).indices
    kept_BN = order_BC[:, :budget].sort(dim=1).values
    tokens_BN = candidates.tokens_BC.gather(1, kept_BN)
    old_parents_BN = candidates.parents_BC.gather(1, kept_BN)
    # Kept candidates are ascending, so a parent's new index is its rank among them, after the root.
    new_parents_BN = torch.searchsorted(kept_BN, old_parents_BN.clamp(min=0)) + 1
    parents_BN = torch.where(old_parents_BN < 0, 0, new_parents_BN)
    return TreeBatch(
        tokens_BN=torch.cat([root_tokens_B[:, None], tokens_BN], dim=1),
        parents_BN=torch.cat([torch.zeros_like(root_tokens_B)[:, None], parents_BN], dim=1),
        sizes=(budget + 1,) * root_tokens_B.shape[0],
    )
