"""Which drafted tokens the target keeps: a walk down each tree, one level at a time.

`walk_gumbel` asks at each node for the token the target itself would sample there, and goes on
while a child holds it. Drafts decide how far one pass gets, never what it says.

`walk_rejection` is the field's usual rule for drafts that are a fixed choice: try the children in
order, keep x with probability p(x), else remove x and renormalise; sample the rest when none stays.
It is exact in distribution, but its text depends on the drafts.

Legend: B requests, N nodes, R rows of logits, V vocabulary,
L levels walked (at most the depth plus one).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels
from fledge.ops.logit_rules import LogitRules
from fledge.ops.logprobs import WalkLogprobs, walk_logprobs
from fledge.ops.noise import gumbel, uniform
from fledge.ops.sampling import SamplingBatch, processed_portions, sample
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

    failed_B: Tensor
    """Whether a visited node had logits that are no numbers: its tokens mean nothing."""

    logprobs: WalkLogprobs | None
    """Of the emitted tokens, when a request asks for them."""


class _Walkers:
    """Where the requests stand in their trees; those that have stopped add nothing more."""

    def __init__(
        self, logits_RV: Tensor, rows_BN: Tensor, tree: TreeBatch, rules: LogitRules | None
    ) -> None:
        self._logits_RV, self._rows_BN, self._rules = logits_RV, rows_BN, rules
        device = logits_RV.device
        self.is_walking_B = torch.ones(tree.num_requests, dtype=torch.bool, device=device)
        self.node_B = torch.zeros(tree.num_requests, dtype=torch.long, device=device)
        self._lengths_B = torch.zeros_like(self.node_B)
        self._failed_B = torch.zeros_like(self.is_walking_B)
        self._tokens: list[Tensor] = []
        self._nodes: list[Tensor] = []

    def logits(self, position_B: Tensor) -> Tensor:
        """Logits at the current nodes, under the rules for what was said on the way there."""
        logits_BV = self._logits_RV[self._rows_BN.gather(1, self.node_B[:, None])[:, 0]]
        is_bad_B = _has_no_best(logits_BV)
        if self._rules is not None:
            logits_BV = self._rules.apply(logits_BV, position_B, self.is_walking_B)
            is_bad_B |= _has_no_best(logits_BV)
        self._failed_B |= is_bad_B & self.is_walking_B
        return logits_BV

    def step(self, token_B: Tensor, child_B: Tensor) -> None:
        """The token chosen at the current node, and the child that holds it (0 for none)."""
        if self._rules is not None:
            self._rules.record(token_B, self.is_walking_B)
        self._tokens.append(token_B)
        self._nodes.append(self.node_B)
        self._lengths_B += self.is_walking_B
        self.is_walking_B = self.is_walking_B & (child_B > 0) & ~self._failed_B
        self.node_B = torch.where(self.is_walking_B, child_B, self.node_B)

    def finish(self, batch: SamplingBatch) -> Walk:
        tokens_BL = torch.stack(self._tokens, dim=1)
        nodes_BL = torch.stack(self._nodes, dim=1)
        logprobs = _logprobs(self._logits_RV, self._rows_BN, nodes_BL, tokens_BL, batch)
        return Walk(tokens_BL, nodes_BL, self._lengths_B, self._failed_B, logprobs)


def _logprobs(
    logits_RV: Tensor, rows_BN: Tensor, nodes_BL: Tensor, tokens_BL: Tensor, batch: SamplingBatch
) -> WalkLogprobs | None:
    if batch.asking_A is None:
        return None
    rows_BL = rows_BN.gather(1, nodes_BL)
    return walk_logprobs(logits_RV, rows_BL, tokens_BL, batch.asking_A, batch.num_logprobs)


def _has_no_best(logits_BV: Tensor) -> Tensor:
    """Boolean [B]: no largest logit that is a number, so nothing can be chosen.

    The largest value of a row that holds a NaN is NaN; infinities would become NaN in the softmax.
    """
    return ~logits_BV.amax(dim=-1).isfinite()


def _levels(walkers: _Walkers, tree: TreeBatch, max_depth: int | None) -> Iterator[int]:
    """Levels to walk: all that the trees may have, or until nobody walks where asking is free."""
    num_levels = tree.max_size if max_depth is None else min(max_depth + 1, tree.max_size)
    # Asking a GPU means waiting for it. A caller that knows the depth of its trees spares that.
    may_ask = max_depth is None or walkers.node_B.device.type == "cpu"
    for level in range(num_levels):
        yield level
        is_last = level == num_levels - 1
        if not is_last and may_ask and not walkers.is_walking_B.any():
            return


def walk_gumbel(
    logits_RV: Tensor,
    rows_BN: Tensor,
    tree: TreeBatch,
    batch: SamplingBatch,
    position_B: Tensor,
    rules: LogitRules | None = None,
    *,
    max_depth: int | None = None,
) -> Walk:
    """Accept drafts that equal the target's own samples.

    `rows` says where a node's logits are, `position` how many tokens each request has said before,
    `max_depth` how deep the trees may be, so that the device need not be asked. Requests that want
    logprobs are named in `batch`.
    """

    def walk_plain() -> Walk:
        real_BN = is_real(tree)
        walkers = _Walkers(logits_RV, rows_BN, tree, rules)
        for level in _levels(walkers, tree, max_depth):
            logits_BV = walkers.logits(position_B + level)
            token_B = sample(logits_BV, batch, position_B + level, walkers.is_walking_B)
            walkers.step(token_B, match_child(tree, real_BN, walkers.node_B, token_B))
        return walkers.finish(batch)

    # Where the depth is not known, asking for it is cheaper than a walk over every node.
    is_bounded = max_depth is not None or tree.max_size == 1
    is_simple = rules is None and not batch.has_filters and is_bounded
    if is_simple and uses_kernels(logits_RV):

        def walk_fused() -> Walk:
            from fledge.ops.accept_triton import walk_nodes

            num_levels = min(tree.max_size, 1 + (max_depth or 0))
            with on_device(logits_RV):
                steps = walk_nodes(
                    logits_RV, rows_BN, tree, batch, position_B, num_levels=num_levels
                )
            logprobs = _logprobs(logits_RV, rows_BN, steps.nodes_BL, steps.tokens_BL, batch)
            return Walk(*steps, logprobs=logprobs)

        kind = (tree.num_requests.bit_length(), tree.max_size, logits_RV.dtype, batch.all_greedy)
        return run_kernel(
            "walks down the trees",
            walk_fused,
            walk_plain,
            kind=kind,
            is_right=lambda walk: _is_same_walk(walk, walk_plain()),
        )
    return walk_plain()


def _is_same_walk(one: Walk, other: Walk) -> bool:
    """Whether both say the same tokens at the same nodes; where logits fail, nothing is said."""
    is_good_B = ~one.failed_B
    same = torch.equal(one.lengths_B[is_good_B], other.lengths_B[is_good_B])
    if not same or not torch.equal(one.failed_B, other.failed_B):
        return False
    num_levels = min(one.tokens_BL.shape[1], other.tokens_BL.shape[1])
    is_said_BL = torch.arange(num_levels, device=one.lengths_B.device) < one.lengths_B[:, None]
    is_said_BL &= is_good_B[:, None]
    return all(
        bool((ours[:, :num_levels] == theirs[:, :num_levels])[is_said_BL].all())
        for ours, theirs in ((one.tokens_BL, other.tokens_BL), (one.nodes_BL, other.nodes_BL))
    )


def walk_rejection(
    logits_RV: Tensor,
    rows_BN: Tensor,
    tree: TreeBatch,
    batch: SamplingBatch,
    position_B: Tensor,
    rules: LogitRules | None = None,
    *,
    max_depth: int | None = None,
) -> Walk:
    """Accept or reject drafts by coins; greedy requests walk as in `walk_gumbel`.

    The number of siblings is read from the device at every level: this rule waits for it.
    """
    if batch.all_greedy:
        return walk_gumbel(logits_RV, rows_BN, tree, batch, position_B, rules, max_depth=max_depth)
    real_BN = is_real(tree)
    walkers = _Walkers(logits_RV, rows_BN, tree, rules)
    for level in _levels(walkers, tree, max_depth):
        level_B = position_B + level
        logits_BV = walkers.logits(level_B)
        token_B, child_B = _try_children(logits_BV, tree, real_BN, walkers.node_B, batch, level_B)
        greedy_token_B = logits_BV.argmax(dim=-1)
        greedy_child_B = match_child(tree, real_BN, walkers.node_B, greedy_token_B)
        walkers.step(
            torch.where(batch.greedy_B, greedy_token_B, token_B),
            torch.where(batch.greedy_B, greedy_child_B, child_B),
        )
    return walkers.finish(batch)


def _try_children(
    logits_BV: Tensor,
    tree: TreeBatch,
    real_BN: Tensor,
    node_B: Tensor,
    batch: SamplingBatch,
    position_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """One level: the token emitted, and the child that was accepted (0 for none)."""
    probs_BV = torch.zeros_like(logits_BV, dtype=torch.float64)
    for rows, scores_SV in processed_portions(logits_BV, batch):
        probs_BV[rows.rows_S] = scores_SV.softmax(dim=-1)
    # Drafts that nobody may enter have no token.
    is_child_BN = (tree.parents_BN == node_B[:, None]) & real_BN & (tree.tokens_BN >= 0)
    is_child_BN[:, 0] = False
    coins_BN = uniform(batch.seed_B, position_B, tree.max_size, _COIN_STREAM)
    accepted_B = torch.zeros_like(node_B)
    children_first_BN = is_child_BN.int().argsort(dim=1, descending=True, stable=True)
    for rank in range(int(is_child_BN.sum(dim=1).max())):
        node_B1 = children_first_BN[:, rank : rank + 1]
        draft_B1 = tree.tokens_BN.gather(1, node_B1).clamp(min=0)
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
