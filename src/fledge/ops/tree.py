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
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """One draft tree per request."""

    tokens_BN: Tensor
    """Target token ids; column 0 is the last committed token."""

    parents_BN: Tensor
    """Index of each node's parent, smaller than its own; 0 for the root itself."""

    sizes_B: Tensor
    """Real nodes of each tree, root included. On the device: no pass waits for the host to know."""

    logprobs_BN: Tensor
    """What the drafter gave each node given its parent, before calibration; 0 for the root."""

    num_drafts: int
    """Real nodes of all trees, roots not counted: what the host may know beforehand."""

    max_depth: int | None = None
    """No tree is deeper; None where that was not said."""

    is_copied_B: Tensor | None = None
    """Whether each tree is a chain copied from the text before; None where none is."""

    @property
    def num_requests(self) -> int:
        return self.tokens_BN.shape[0]

    @property
    def max_size(self) -> int:
        return self.tokens_BN.shape[1]


def root_only(root_tokens_B: Tensor) -> TreeBatch:
    """Trees without drafts: verifying them is plain decoding."""
    num_requests, device = root_tokens_B.shape[0], root_tokens_B.device
    return TreeBatch(
        tokens_BN=root_tokens_B[:, None],
        parents_BN=_zeros(num_requests, torch.long, device),
        sizes_B=_full_sizes(num_requests, 1, device),
        logprobs_BN=_zeros(num_requests, torch.float32, device),
        num_drafts=0,
    )


def is_real(tree: TreeBatch) -> Tensor:
    """Boolean [B, N]: which nodes are not padding."""
    return torch.arange(tree.max_size, device=tree.sizes_B.device) < tree.sizes_B[:, None]


def ancestors(parents_BN: Tensor, max_depth: int | None = None) -> Tensor:
    """Boolean [B, N, N]: column is the row's node itself or above it; no tree is deeper than said.

    Without a depth trees may be as deep as they have nodes.
    """
    num_nodes = parents_BN.shape[1]
    deepest = num_nodes - 1 if max_depth is None else min(max_depth, num_nodes - 1)
    own_NN = torch.eye(num_nodes, dtype=torch.bool, device=parents_BN.device)
    # Pointer doubling: after i rounds a row has seen 2**i generations, itself among them.
    seen_BNN, jump_BN = own_NN.expand(parents_BN.shape[0], -1, -1), parents_BN
    num_rounds = max(1, deepest.bit_length())
    for number in range(num_rounds):
        seen_BNN = seen_BNN | seen_BNN.gather(1, jump_BN[:, :, None].expand_as(seen_BNN))
        if number + 1 < num_rounds:
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
    """Calibrated log-probability of the whole path; a child never scores above its parent."""

    logprobs_BC: Tensor
    """What the drafter gave each node given its parent, before calibration."""

    parents_BC: Tensor
    """Index of the parent among the candidates, -1 below the root."""


def select_trees(
    root_tokens_B: Tensor,
    candidates: Candidates,
    *,
    num_nodes: int,
    max_nodes: int,
    is_chain: bool = False,
) -> TreeBatch:
    """The `num_nodes` most probable candidates of the whole batch, at most `max_nodes` a request.

    `is_chain` says that every candidate is the only child of the one before it.

    Stable sorts keep every tree closed under parents: a parent scores at least as much as its child
    and comes first, so a tie between the two goes to the parent. How many nodes there are in all is
    known beforehand; how they fall on the requests stays on the device.
    """
    num_requests, num_candidates = candidates.scores_BC.shape
    max_nodes = min(max_nodes, num_candidates)
    if is_chain:
        return _cut_chains(root_tokens_B, candidates, num_nodes, max_nodes)
    order_BC = candidates.scores_BC.sort(dim=1, descending=True, stable=True).indices
    best_BN = order_BC[:, :max_nodes]
    kept_BN = _best_of_all(candidates.scores_BC.gather(1, best_BN), num_nodes)
    # Kept candidates in their old order, so that parents come first; what is not kept goes last.
    places_BN = torch.where(kept_BN, best_BN, num_candidates).sort(dim=1).values
    is_real_BN = places_BN < num_candidates
    safe_BN = places_BN.clamp(max=num_candidates - 1)
    old_parents_BN = candidates.parents_BC.gather(1, safe_BN)
    # Places are ascending, so a parent's new index is its rank among them, after the root.
    new_parents_BN = torch.searchsorted(places_BN, old_parents_BN.clamp(min=0)) + 1
    has_parent_BN = is_real_BN & (old_parents_BN >= 0)

    def with_root(root_B1: Tensor, nodes_BN: Tensor) -> Tensor:
        return torch.cat([root_B1, nodes_BN.where(is_real_BN, torch.zeros_like(nodes_BN))], dim=1)

    no_B1 = torch.zeros(num_requests, 1, dtype=torch.long, device=root_tokens_B.device)
    logprobs_BN = candidates.logprobs_BC.gather(1, safe_BN)
    return TreeBatch(
        tokens_BN=with_root(root_tokens_B[:, None], candidates.tokens_BC.gather(1, safe_BN)),
        parents_BN=with_root(no_B1, new_parents_BN.where(has_parent_BN, no_B1)),
        sizes_B=is_real_BN.sum(dim=1) + 1,
        logprobs_BN=with_root(no_B1.to(logprobs_BN.dtype), logprobs_BN),
        num_drafts=min(num_nodes, num_requests * max_nodes),
    )


def _cut_chains(
    root_tokens_B: Tensor, candidates: Candidates, num_nodes: int, max_nodes: int
) -> TreeBatch:
    """Chains are in falling order: the best nodes of each are its first ones."""
    num_requests = root_tokens_B.shape[0]
    tokens_BN, logprobs_BN = (
        candidates.tokens_BC[:, :max_nodes],
        candidates.logprobs_BC[:, :max_nodes],
    )
    parents_BN = _chain_parents(num_requests, max_nodes, root_tokens_B.device)
    no_logprobs_B1 = _zeros(num_requests, logprobs_BN.dtype, root_tokens_B.device)
    if num_nodes >= num_requests * max_nodes:
        sizes_B = _full_sizes(num_requests, max_nodes + 1, root_tokens_B.device)
    else:
        kept_BN = _best_of_all(candidates.scores_BC[:, :max_nodes], num_nodes)
        tokens_BN, logprobs_BN = tokens_BN * kept_BN, logprobs_BN.masked_fill(~kept_BN, 0.0)
        parents_BN = torch.cat([parents_BN[:, :1], parents_BN[:, 1:] * kept_BN], dim=1)
        sizes_B = kept_BN.sum(dim=1) + 1
    return TreeBatch(
        tokens_BN=torch.cat([root_tokens_B[:, None], tokens_BN], dim=1),
        parents_BN=parents_BN,
        sizes_B=sizes_B,
        logprobs_BN=torch.cat([no_logprobs_B1, logprobs_BN], dim=1),
        num_drafts=min(num_nodes, num_requests * max_nodes),
    )


# Constants are made once and never let go: a captured graph may have read them.


@cache
def _chain_parents(num_requests: int, num_nodes: int, device: torch.device) -> Tensor:
    above_N = torch.arange(-1, num_nodes, device=device).clamp(min=0)
    return above_N.repeat(num_requests, 1)


@cache
def _full_sizes(num_requests: int, size: int, device: torch.device) -> Tensor:
    return torch.full((num_requests,), size, device=device)


@cache
def _zeros(num_requests: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(num_requests, 1, dtype=dtype, device=device)


def with_roots(trees: TreeBatch, root_tokens_B: Tensor) -> TreeBatch:
    """The trees, and behind them further requests that have only a root."""
    more, (num_drafted, width) = root_tokens_B.shape[0] - trees.num_requests, trees.tokens_BN.shape

    def padded(rows_BN: Tensor) -> Tensor:
        return torch.cat([rows_BN, rows_BN.new_zeros(more, width)])

    tokens_BN = padded(trees.tokens_BN)
    tokens_BN[num_drafted:, 0] = root_tokens_B[num_drafted:]
    return TreeBatch(
        tokens_BN=tokens_BN,
        parents_BN=padded(trees.parents_BN),
        sizes_B=torch.cat([trees.sizes_B, trees.sizes_B.new_ones(more)]),
        logprobs_BN=padded(trees.logprobs_BN),
        num_drafts=trees.num_drafts,
        max_depth=trees.max_depth,
        is_copied_B=_padded(trees.is_copied_B, more),
    )


def _padded(is_copied_B: Tensor | None, more: int) -> Tensor | None:
    """Further requests have nothing that could be copied."""
    return None if is_copied_B is None else torch.nn.functional.pad(is_copied_B, (0, more))


def _best_of_all(scores_BN: Tensor, num_nodes: int) -> Tensor:
    """Boolean [B, N]: the best `num_nodes` entries over all rows; rows are in falling order."""
    if num_nodes >= scores_BN.numel():
        return torch.ones_like(scores_BN, dtype=torch.bool)
    kept = torch.zeros(scores_BN.numel(), dtype=torch.bool, device=scores_BN.device)
    # Column by column, so that equal scores go to the requests in turns.
    order = scores_BN.t().flatten().sort(descending=True, stable=True).indices
    kept.index_fill_(0, order[:num_nodes], True)
    return kept.view(scores_BN.shape[1], scores_BN.shape[0]).t().contiguous()
