"""The loss of `soft_targets` without keeping logits: some rows at a time, gradients at once.

For a chunk of the target's rows its logits are made once and compared with the draft logits of all
steps. Losses and figures of the rows are kept, and so are the gradients, already multiplied back
through the output matrix; the logits are gone before the next chunk. The backward pass only scales.

Legend: R rows with a label, C of them in a chunk, K draft steps, P = C x K pairs of a row and a
step, T tokens, D hidden size, V draft vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fledge.contracts.train_settings import LossKind
from fledge.ops.chain_weights import ChainWeights
from fledge.ops.kernel_choice import on_device
from fledge.ops.micro_batch import TargetRows
from fledge.ops.soft_targets import (
    BLEND_RATE,
    TINY,
    DraftReadout,
    Labels,
    LossRows,
    row_losses,
    target_logits,
)
from fledge.ops.wide_product import add_product, wide_product

_LOGITS_AT_ONCE = {"cuda": 1 << 28, "cpu": 1 << 22}
"""Draft logits that are made at once: enough for efficient products, about a gigabyte."""


class Compared(NamedTuple):
    """What comes of the logits of a chunk."""

    loss_CK: Tensor
    correct_CK: Tensor
    accepted_CK: Tensor
    entropy_C: Tensor
    slope_PV: Tensor | None
    """Gradient of the weighted loss by the draft logits."""

    chain_CK: Tensor | None = None
    """How likely the guesses before are accepted, where that counts."""


class Chunk(NamedTuple):
    """Some of the target's rows, and how they count."""

    greedy_C: Tensor
    mass_C: Tensor
    weights_CK: Tensor


def soft_target_loss(
    normed: Sequence[Tensor],
    lm_head_VD: Tensor,
    labels: Labels,
    readout: DraftReadout | None,
    weights_K: Tensor,
    kind: LossKind,
    *,
    chains: ChainWeights | None = None,
) -> LossRows:
    """As the twin; `lm_head_VD` may be wider than the outputs and gets its gradient as wide.

    Where it wants none, none is made: a third of the products with it.
    """
    stacked_KTD = torch.stack(tuple(normed))
    wants_grad = torch.is_grad_enabled() and stacked_KTD.requires_grad
    rows: tuple[Tensor, ...] = _SoftTargets.apply(  # type: ignore[no-untyped-call]
        stacked_KTD, lm_head_VD, labels, readout, weights_K, kind, chains, wants_grad
    )
    return LossRows(*rows)


class _SoftTargets(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stacked_KTD: Tensor,
        lm_head_VD: Tensor,
        labels: Labels,
        readout: DraftReadout | None,
        weights_K: Tensor,
        kind: LossKind,
        chains: ChainWeights | None,
        wants_grad: bool,
    ) -> tuple[Tensor, ...]:
        chunks = _Chunks(stacked_KTD, lm_head_VD, labels, readout, weights_K, wants_grad)
        if wants_grad and ctx.needs_input_grad[1]:
            chunks.learn_rows(lm_head_VD)
        if chains is not None:
            chunks.weigh(chains)
        compared = [chunks.compare(rows, kind) for rows in chunks.rows()]
        ctx.grads = (chunks.grad_KTD, chunks.grad_VD)
        is_asked_RK = labels.is_asked_RK
        is_used_RK = is_asked_RK & labels.counts_R[:, None]
        loss_RK = torch.where(is_used_RK, torch.cat([one.loss_CK for one in compared]), 0.0)
        weights_RK = weights_K.to(loss_RK.dtype).expand_as(loss_RK)
        if chains is not None:
            found = [one.chain_CK for one in compared if one.chain_CK is not None]
            weights_RK = weights_RK * torch.cat(found)
        loss = (loss_RK * weights_RK).sum()
        accepted_RK = torch.cat([one.accepted_CK for one in compared])
        outputs = (
            loss_RK,
            torch.cat([one.correct_CK for one in compared]) & is_asked_RK,
            torch.where(is_asked_RK, accepted_RK, 0.0),
            torch.cat([one.entropy_C for one in compared]),
        )
        ctx.mark_non_differentiable(*outputs)
        return (loss, *outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_KTD, grad_VD = ctx.grads
        ctx.grads = None
        grad_KTD.mul_(grads[0].to(grad_KTD.dtype))
        if grad_VD is not None:
            grad_VD.mul_(grads[0])
        return (grad_KTD, grad_VD, None, None, None, None, None, None)


class _Chunks:
    """The work of one forward pass, and the gradients it gathers."""

    def __init__(
        self,
        stacked_KTD: Tensor,
        lm_head_VD: Tensor,
        labels: Labels,
        readout: DraftReadout | None,
        weights_K: Tensor,
        wants_grad: bool,
    ) -> None:
        num_steps, num_tokens, size = stacked_KTD.shape
        self._labels, self._readout = labels, readout
        self._hidden_FD = stacked_KTD.reshape(-1, size)
        self._weight_VD = lm_head_VD.to(stacked_KTD.dtype)
        wide = torch.promote_types(stacked_KTD.dtype, torch.float32)
        is_asked_RK = labels.is_asked_RK
        is_used_RK = is_asked_RK & labels.counts_R[:, None]
        self._weights_RK = torch.where(is_used_RK, weights_K.to(wide), 0.0)
        self._mass_R = labels.targets.log_mass_R.to(wide).exp()
        steps_K = torch.arange(num_steps, device=stacked_KTD.device)
        nowhere = num_steps * num_tokens
        flat_RK = labels.index_RK + steps_K * num_tokens
        self._to_RK = torch.where(is_asked_RK, flat_RK, nowhere)
        self._from_RK = torch.where(is_asked_RK, flat_RK, 0)
        self.grad_VD: Tensor | None = None
        self.grad_KTD: Tensor | None = None
        self._chains: ChainWeights | None = None
        if wants_grad:
            # One row more than there are: where the gradients of rows that are not asked go.
            self._grad_FD = stacked_KTD.new_zeros((nowhere + 1, size))
            self.grad_KTD = self._grad_FD[:nowhere].view(stacked_KTD.shape)

    def learn_rows(self, lm_head_VD: Tensor) -> None:
        """Gather the gradient of the output matrix too."""
        self.grad_VD = torch.zeros_like(lm_head_VD, memory_format=torch.contiguous_format)

    def weigh(self, chains: ChainWeights) -> None:
        """Rows lie in the order of their tokens, so all guesses before a row are known with it."""
        self._chains = chains
        shape = (self._labels.num_indices + 1, self._to_RK.shape[1])
        self._accepted_TK = self._weights_RK.new_ones(shape)

    def rows(self) -> list[slice]:
        """At least one chunk, which may be empty."""
        num_rows, num_steps = self._to_RK.shape
        at_once = _LOGITS_AT_ONCE[self._weight_VD.device.type]
        at_once = max(1, at_once // (num_steps * self._weight_VD.shape[0]))
        return [slice(i, i + at_once) for i in range(0, max(num_rows, 1), at_once)]

    def compare(self, rows: slice, kind: LossKind) -> Compared:
        """Of some rows, whether asked or not; what is not asked has no weight."""
        labels = self._labels
        hidden_PD = self._hidden_FD[self._from_RK[rows].flatten()]
        draft_PV = wide_product(hidden_PD, self._weight_VD.T)
        target_CV = target_logits(_some(labels.targets, rows), self._readout, self._weight_VD)
        chunk = Chunk(labels.greedy_R[rows], self._mass_R[rows], self._weights_RK[rows])
        slope_dtype = None if self.grad_KTD is None else hidden_PD.dtype
        compared = compare_rows(target_CV, draft_PV, chunk, kind, slope_dtype)
        if self._chains is not None:
            index_CK = labels.index_RK[rows]
            self._accepted_TK.scatter_(0, index_CK, compared.accepted_CK)
            chain_CK = self._chains.of(self._accepted_TK, labels.first_rows_T, index_CK)
            compared = compared._replace(chain_CK=chain_CK)
        if compared.slope_PV is not None:
            to_P = self._to_RK[rows].flatten()
            grad_PD = compared.slope_PV @ self._weight_VD
            if compared.chain_CK is not None:
                chain_P1 = compared.chain_CK.flatten()[:, None].to(hidden_PD.dtype)
                grad_PD, hidden_PD = grad_PD * chain_P1, hidden_PD * chain_P1
            self._grad_FD.index_copy_(0, to_P, grad_PD)
            if self.grad_VD is not None:
                add_product(self.grad_VD, compared.slope_PV.T, hidden_PD)
        return compared._replace(slope_PV=None)


def compare_rows(
    target_CV: Tensor,
    draft_PV: Tensor,
    chunk: Chunk,
    kind: LossKind,
    slope_dtype: torch.dtype | None,
) -> Compared:
    """Losses and figures of wide logits, and the gradient unless its dtype is None."""
    if draft_PV.is_cuda and draft_PV.dtype == torch.float32:
        from fledge.ops.soft_targets_triton import compare_rows_fused

        with on_device(draft_PV):
            return compare_rows_fused(target_CV, draft_PV, chunk, kind, slope_dtype)
    return compare_rows_plain(target_CV, draft_PV, chunk, kind, slope_dtype)


def compare_rows_plain(
    target_CV: Tensor,
    draft_PV: Tensor,
    chunk: Chunk,
    kind: LossKind,
    slope_dtype: torch.dtype | None,
) -> Compared:
    """The twin of the kernels in `soft_targets_triton`."""
    num_rows, num_steps = chunk.weights_CK.shape
    draft_CKV = draft_PV.view(num_rows, num_steps, target_CV.shape[1])
    logp_CV = target_CV.log_softmax(dim=-1)
    p_CV = logp_CV.exp()
    logq_CKV = draft_CKV.log_softmax(dim=-1)
    q_CKV = logq_CKV.exp()
    kept_C1V = (p_CV * chunk.mass_C[:, None])[:, None]
    accepted_CK = torch.minimum(kept_C1V, q_CKV).sum(dim=-1)
    slope_CKV = None
    if slope_dtype is not None:
        weights_CK1 = chunk.weights_CK[..., None]
        slope_CKV = _slopes(kind, p_CV[:, None], q_CKV, kept_C1V, accepted_CK, weights_CK1)
    return Compared(
        loss_CK=row_losses(kind, p_CV[:, None], logq_CKV, accepted_CK),
        correct_CK=draft_CKV.argmax(dim=-1) == chunk.greedy_C[:, None],
        accepted_CK=accepted_CK,
        entropy_C=-(p_CV * logp_CV.clamp(min=-1e30)).sum(dim=-1),
        slope_PV=None if slope_CKV is None else slope_CKV.view(draft_PV.shape).to(slope_dtype),
    )


def _slopes(
    kind: LossKind,
    p_C1V: Tensor,
    q_CKV: Tensor,
    kept_C1V: Tensor,
    accepted_CK: Tensor,
    weights_CK1: Tensor,
) -> Tensor:
    """Gradient of the weighted losses by the draft logits."""
    if kind == "soft_cross_entropy":
        return (q_CKV - p_C1V) * weights_CK1
    accepted_CK1 = accepted_CK[..., None]
    is_below_CKV = (q_CKV < kept_C1V).to(q_CKV.dtype)
    refused_CKV = q_CKV * ((q_CKV * is_below_CKV).sum(dim=-1, keepdim=True) - is_below_CKV)
    if kind == "acceptance":
        return refused_CKV * torch.where(accepted_CK1 > TINY, weights_CK1 / accepted_CK1, 0.0)
    share_CK1 = torch.exp(-BLEND_RATE * accepted_CK1)
    return (share_CK1 * (q_CKV - p_C1V) + (1 - share_CK1) * refused_CKV) * weights_CK1


def _some(targets: TargetRows, rows: slice) -> TargetRows:
    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[rows]

    return TargetRows(
        rows_R=targets.rows_R[rows],
        greedy_R=targets.greedy_R[rows],
        log_mass_R=targets.log_mass_R[rows],
        final_RD=cut(targets.final_RD),
        top_ids_RC=cut(targets.top_ids_RC),
        top_logprobs_RC=cut(targets.top_logprobs_RC),
    )
