"""What the head is taught: the target's distributions, at every draft step that reaches them.

The target's row j is asked of index j-1-k at step k: the same row, K times.
`soft_target_loss_plain` is the twin that writes everything out.

Three losses. `soft_cross_entropy` is -sum p log q over the draft vocabulary, p renormalised on it.
`acceptance` is -log sum min(p, q), p over the whole vocabulary: the chance that a token drafted
from q is kept. The logarithm is there because 1 - sum min(p, q) has a gradient in proportion to q,
so that rows which the head gets entirely wrong would teach it nothing; divided by the sum, they
teach as much as others. `blend` is w times the first plus (1 - w)(1 - sum min(p, q)), where w is
exp(-3 sum min(p, q)): far from the target the cross-entropy leads, near it what is accepted.
p is that of the target at the temperature of `DraftReadout`.

Legend: T tokens, R rows with a label, K draft steps, D hidden size, V draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.contracts.train_settings import LossKind
from fledge.ops.chain_weights import ChainWeights
from fledge.ops.documents import Documents
from fledge.ops.micro_batch import TargetRows
from fledge.ops.suffixes import Suffixes
from fledge.ops.wide_product import wide_product

TINY = 1e-30
"""Least acceptance that a logarithm is taken of."""

BLEND_RATE = 3.0
"""How fast a blend turns from the cross-entropy as acceptance grows."""


@dataclass(frozen=True, slots=True)
class DraftReadout:
    """The target's output matrix at the tokens of the draft vocabulary, and what follows it."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0

    def logits(self, final_RD: Tensor) -> Tensor:
        """Wide logits [R, V], divided by the temperature."""
        logits_RV = wide_product(final_RD.to(self.weight_VD.dtype), self.weight_VD.T)
        if self.bias_V is not None:
            logits_RV = logits_RV + self.bias_V
        if self.scale != 1.0:
            logits_RV = logits_RV * self.scale
        if self.soft_cap is not None:
            logits_RV = self.soft_cap * torch.tanh(logits_RV / self.soft_cap)
        if self.temperature != 1.0:
            logits_RV = logits_RV / self.temperature
        return logits_RV


@dataclass(frozen=True, slots=True)
class Labels:
    """The target's rows as the loss sees them."""

    targets: TargetRows
    greedy_R: Tensor
    """The target's best token as a draft token; -1 where the draft vocabulary lacks it."""

    index_RK: Tensor
    """Index that a row is asked of, among those computed; `num_indices` where there is none."""

    counts_R: Tensor
    """Whether the row has a part in the loss; it is measured in any case."""

    first_rows_T: Tensor
    """Of each index that is computed: where its document begins."""

    @property
    def num_indices(self) -> int:
        return len(self.first_rows_T)

    @property
    def is_asked_RK(self) -> Tensor:
        return self.index_RK < self.num_indices


class LossRows(NamedTuple):
    """Of every row at every step; zero where a row is not asked."""

    loss: Tensor
    """Scalar, weighted by step, differentiable."""

    loss_RK: Tensor
    correct_RK: Tensor
    accepted_RK: Tensor
    entropy_R: Tensor


def find_labels(
    targets: TargetRows,
    documents: Documents,
    suffixes: Suffixes | None,
    draft_of_target: Tensor,
    *,
    num_steps: int,
    greedy_in_vocab_only: bool,
) -> Labels:
    """Where each row of the target is asked; `draft_of_target` has -1 for tokens not drafted.

    With suffixes, only their indices are computed, and all labels must be reached from them.
    """
    steps_K = torch.arange(num_steps, device=targets.rows_R.device)
    is_asked_RK = documents.positions_T[targets.rows_R][:, None] > steps_K
    index_RK = (targets.rows_R[:, None] - 1 - steps_K).clamp(min=0)
    if suffixes is not None:
        index_RK = suffixes.numbers_T[index_RK]
    positions_T = documents.positions_T
    rows_T = torch.arange(len(positions_T), device=positions_T.device)
    first_rows_T = rows_T - positions_T
    if suffixes is not None:
        first_rows_T = first_rows_T[suffixes.rows_A]
    num_indices = len(first_rows_T)
    greedy_R = draft_of_target[targets.greedy_R]
    all_R = torch.ones_like(greedy_R, dtype=torch.bool)
    return Labels(
        targets=targets,
        greedy_R=greedy_R,
        index_RK=torch.where(is_asked_RK, index_RK, num_indices),
        counts_R=greedy_R >= 0 if greedy_in_vocab_only else all_R,
        first_rows_T=first_rows_T,
    )


def soft_target_loss_plain(
    normed: Sequence[Tensor],
    lm_head_VD: Tensor,
    labels: Labels,
    readout: DraftReadout | None,
    weights_K: Tensor,
    kind: LossKind,
    *,
    chains: ChainWeights | None = None,
) -> LossRows:
    """All logits of all steps, written out; `normed` holds K outputs [T, D]."""
    targets = labels.targets
    logp_RV = target_logits(targets, readout, lm_head_VD).log_softmax(dim=-1)
    p_RV = logp_RV.exp()
    kept_RV = p_RV * targets.log_mass_R.to(p_RV.dtype).exp()[:, None]
    losses, corrects, accepts = [], [], []
    for step, normed_TD in enumerate(normed):
        is_asked_R = labels.is_asked_RK[:, step]
        index_R = labels.index_RK[:, step].clamp(max=labels.num_indices - 1)
        logits_RV = F.linear(normed_TD[index_R], lm_head_VD)
        logq_RV = logits_RV.to(p_RV.dtype).log_softmax(dim=-1)
        is_measured = kind == "soft_cross_entropy"
        with torch.set_grad_enabled(not is_measured and torch.is_grad_enabled()):
            accepted_R = torch.minimum(kept_RV, logq_RV.exp()).sum(dim=-1)
        loss_R = row_losses(kind, p_RV, logq_RV, accepted_R)
        losses.append(loss_R * (is_asked_R & labels.counts_R))
        corrects.append((logits_RV.argmax(dim=-1) == labels.greedy_R) & is_asked_R)
        accepts.append(accepted_R.detach() * is_asked_R)
    loss_RK, accepted_RK = torch.stack(losses, dim=1), torch.stack(accepts, dim=1)
    weights_RK = weights_K.to(loss_RK.dtype).expand_as(loss_RK)
    if chains is not None:
        shape = (labels.num_indices + 1, accepted_RK.shape[1])
        accepted_TK = accepted_RK.new_ones(shape).scatter(0, labels.index_RK, accepted_RK)
        weights_RK = weights_RK * chains.of(accepted_TK, labels.first_rows_T, labels.index_RK)
    return LossRows(
        loss=(loss_RK * weights_RK).sum(),
        loss_RK=loss_RK.detach(),
        correct_RK=torch.stack(corrects, dim=1),
        accepted_RK=accepted_RK,
        entropy_R=-(p_RV * logp_RV.clamp(min=-1e30)).sum(dim=-1),
    )


def row_losses(kind: LossKind, p: Tensor, logq: Tensor, accepted: Tensor) -> Tensor:
    """Losses of distributions along the last dimension, with their sums of min(p, q)."""
    if kind == "acceptance":
        return -accepted.clamp(min=TINY).log()
    cross_entropy = -(p * logq).sum(dim=-1)
    if kind == "soft_cross_entropy":
        return cross_entropy
    share = torch.exp(-BLEND_RATE * accepted.detach())
    return share * cross_entropy + (1 - share) * (1 - accepted)


def target_logits(targets: TargetRows, readout: DraftReadout | None, lm_head_VD: Tensor) -> Tensor:
    """The target's logits over the draft vocabulary, [R, V]; -inf for all but the kept tops."""
    if targets.top_ids_RC is not None and targets.top_logprobs_RC is not None:
        wide = _wide(lm_head_VD)
        shape = (targets.top_ids_RC.shape[0], lm_head_VD.shape[0])
        all_RV = torch.full(shape, -torch.inf, dtype=wide, device=lm_head_VD.device)
        return all_RV.scatter_(1, targets.top_ids_RC.long(), targets.top_logprobs_RC.to(wide))
    assert targets.final_RD is not None
    assert readout is not None
    return readout.logits(targets.final_RD)


def feature_loss(normed: Sequence[Tensor], labels: Labels, weights_K: Tensor) -> Tensor:
    """Smooth L1 between the head's normed outputs and the target's final hidden states."""
    final_RD = labels.targets.final_RD
    assert final_RD is not None
    losses = []
    for step, normed_TD in enumerate(normed):
        is_used_R = labels.is_asked_RK[:, step] & labels.counts_R
        index_R = labels.index_RK[:, step].clamp(max=labels.num_indices - 1)
        own_RD = normed_TD[index_R].to(_wide(normed_TD))
        error_RD = F.smooth_l1_loss(own_RD, final_RD.to(own_RD.dtype), reduction="none")
        losses.append((error_RD.mean(dim=-1) * is_used_R).sum())
    return (torch.stack(losses) * weights_K.to(losses[0].dtype)).sum()


def chain_counts(correct_RK: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """Per step: indices correct at every step up to it, and those offered such a step."""
    # One row behind the last index takes what is not asked.
    shape = (labels.num_indices + 1, correct_RK.shape[1])
    nothing_TK = torch.zeros(shape, dtype=torch.bool, device=correct_RK.device)
    is_asked_TK = nothing_TK.scatter(0, labels.index_RK, labels.is_asked_RK)
    is_right_TK = nothing_TK.scatter(0, labels.index_RK, correct_RK)
    # Correct up to a step and asked at all of them: a product along the steps.
    chained_TK = is_right_TK.int().cumprod(dim=1)
    before_TK = F.pad(chained_TK[:, :-1], (1, 0), value=1)
    return chained_TK.sum(dim=0), (before_TK * is_asked_TK).sum(dim=0)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
