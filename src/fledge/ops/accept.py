"""Which drafted tokens the target keeps: a walk down each tree, one level at a time.

`walk_gumbel` asks at each node for the token the target itself would sample there, and goes on
while a child holds it. Drafts decide how far one pass gets, never what it says.

`walk_rejection` is the field's usual rule for drafts that are a fixed choice: try the children in
order, keep x with probability p(x), else remove x and renormalise; sample the rest when none stays.
It is exact in distribution, but its text depends on the drafts.

Legend: B requests, N nodes, R rows of logits, V vocabulary,
L levels walked (at most the depth plus one).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.ops.noise import gumbel, uniform
from fledge.ops.penalties import Penalties
from fledge.ops.sampling import SamplingBatch, process_logits, sample
from fledge.ops.tree import TreeBatch, is_real, match_child

_COIN_STREAM = 1
_RESIDUAL_STREAM = 2


@dataclass(frozen=True, slots=True)
class Walk:
    """What one verify pass yielded."""

    tokens_BL: Tensor
    """Emitted tokens: the accepted drafts, then one token of the target's own."""

    nodes_BL: Tensor
    """Nodes whose logits chose them: the root, then the accepted drafts."""

    lengths_B: Tensor
    """How many of the L columns count, at least one."""


class _Recorder:
    """Collects the levels of a walk; requests that have stopped add nothing more."""

    def __init__(
        self, num_requests: int, device: torch.device, penalties: Penalties | None
    ) -> None:
        self._penalties = penalties
        self.walking_B = torch.ones(num_requests, dtype=torch.bool, device=device)
        self.node_B = torch.zeros(num_requests, dtype=torch.long, device=device)
        self._lengths_B = torch.zeros_like(self.node_B)
        self._tokens: list[Tensor] = []
        self._nodes: list[Tensor] = []

    def logits(self, logits_RV: Tensor, rows_BN: Tensor) -> Tensor:
        """Logits at the current nodes, with what was said on the way there held against them."""
        logits_BV = logits_RV[rows_BN.gather(1, self.node_B[:, None])[:, 0]]
        return logits_BV if self._penalties is None else self._penalties.apply(logits_BV)

    def record(self, token_B: Tensor, child_B: Tensor) -> None:
        """The token chosen at the current node, and the child that holds it (0 for none)."""
        if self._penalties is not None:
            self._penalties.record(token_B)
        self._tokens.append(token_B)
        self._nodes.append(self.node_B)
        self._lengths_B += self.walking_B
        self.walking_B = self.walking_B & (child_B > 0)
        self.node_B = torch.where(self.walking_B, child_B, self.node_B)

    def finish(self) -> Walk:
        return Walk(
            tokens_BL=torch.stack(self._tokens, dim=1),
            nodes_BL=torch.stack(self._nodes, dim=1),
            lengths_B=self._lengths_B,
        )


def walk_gumbel(
    logits_RV: Tensor,
    rows_BN: Tensor,
    tree: TreeBatch,
    batch: SamplingBatch,
    position_B: Tensor,
    penalties: Penalties | None = None,
) -> Walk:
    """Accept drafts that equal the target's own samples; `rows` says where a node's logits are."""
    real_BN = is_real(tree)
    recorder = _Recorder(tree.num_requests, logits_RV.device, penalties)
    for level in range(tree.max_size):
        logits_BV = recorder.logits(logits_RV, rows_BN)
        token_B = sample(logits_BV, batch, position_B + level)
        recorder.record(token_B, match_child(tree, real_BN, recorder.node_B, token_B))
        if not recorder.walking_B.any():
            break
    return recorder.finish()


def walk_rejection(
    logits_RV: Tensor,
    rows_BN: Tensor,
    tree: TreeBatch,
    batch: SamplingBatch,
    position_B: Tensor,
    penalties: Penalties | None = None,
) -> Walk:
    """Accept or reject drafts by coins; greedy requests walk as in `walk_gumbel`."""
    if batch.all_greedy:
        return walk_gumbel(logits_RV, rows_BN, tree, batch, position_B, penalties)
    real_BN = is_real(tree)
    recorder = _Recorder(tree.num_requests, logits_RV.device, penalties)
    for level in range(tree.max_size):
        logits_BV = recorder.logits(logits_RV, rows_BN)
        level_B = position_B + level
        token_B, child_B = _try_children(logits_BV, tree, real_BN, recorder.node_B, batch, level_B)
        greedy_token_B = logits_BV.argmax(dim=-1)
        greedy_child_B = match_child(tree, real_BN, recorder.node_B, greedy_token_B)
        recorder.record(
            torch.where(batch.greedy_B, greedy_token_B, token_B),
            torch.where(batch.greedy_B, greedy_child_B, child_B),
        )
        if not recorder.walking_B.any():
            break
    return recorder.finish()


def _try_children(
    logits_BV: Tensor,
    tree: TreeBatch,
    real_BN: Tensor,
    node_B: Tensor,
    batch: SamplingBatch,
    position_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """One level: the token emitted, and the child that was accepted (0 for none)."""
    probs_BV = process_logits(logits_BV, batch).softmax(dim=-1)
    is_child_BN = (tree.parents_BN == node_B[:, None]) & real_BN
    is_child_BN[:, 0] = False
    coins_BN = uniform(batch.seed_B, position_B, tree.max_size, _COIN_STREAM)
    accepted_B = torch.zeros_like(node_B)
    children_first_BN = is_child_BN.int().argsort(dim=1, descending=True, stable=True)
    for rank in range(int(is_child_BN.sum(dim=1).max())):
        node_B1 = children_first_BN[:, rank : rank + 1]
        draft_B1 = tree.tokens_BN.gather(1, node_B1)
        is_tried_B = is_child_BN.gather(1, node_B1)[:, 0] & (accepted_B == 0)
        coin_B1, prob_B1 = coins_BN.gather(1, node_B1), probs_BV.gather(1, draft_B1)
        is_taken_B = is_tried_B & (coin_B1 < prob_B1)[:, 0]
        accepted_B = torch.where(is_taken_B, node_B1[:, 0], accepted_B)
        probs_BV = _remove(probs_BV, draft_B1, is_tried_B & ~is_taken_B)
    noise_BV = gumbel(batch.seed_B, position_B, logits_BV.shape[-1], _RESIDUAL_STREAM)
    residual_B = (probs_BV.log() + noise_BV).argmax(dim=-1)
    draft_B = tree.tokens_BN.gather(1, accepted_B[:, None])[:, 0]
    return torch.where(accepted_B > 0, draft_B, residual_B), accepted_B


def _remove(probs_BV: Tensor, token_B1: Tensor, is_rejected_B: Tensor) -> Tensor:
    """Take a rejected draft out of the distribution and renormalise what is left."""
    left_BV = probs_BV.scatter(1, token_B1, 0.0)
    total_B1 = left_BV.sum(dim=-1, keepdim=True)
    # Rounding may leave nothing although p(x) < 1 was drawn against: then x was all there is.
    is_empty_B1 = total_B1 <= 0
    left_BV = torch.where(is_empty_B1, probs_BV, left_BV / total_B1.clamp(min=1e-300))
    return torch.where(is_rejected_B[:, None], left_BV, probs_BV)
