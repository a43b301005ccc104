"""Attention of training-time test: what a head sees that has drafted k tokens.

At step k an index sees the step-0 keys of its document up to itself, which serving made of true
features, and one key of each later step, its own: those that serving made of guesses.

    step 2, index 3        step-0 keys  0 1 2 3        keys of steps 1 and 2, of index 3 only
    positions                           1 2 3 4                              5 6

A window counts positions: at step k the step-0 keys are k positions further away.

`attend_step_plain` is the twin. `attend_step` keeps no score: flash attention over the documents is
merged with the few keys of later steps by their log-sum-exp, and its backward pass is given the
merged output and sum.

Legend: T tokens, A of them in the documents' ends, H query heads, G key heads, D head size, S keys
of later steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fledge.ops.attention import AttentionSpec
from fledge.ops.document_flash import Attended, DocumentFlash
from fledge.ops.documents import Documents
from fledge.ops.key_merge import merge, merge_backward
from fledge.ops.suffixes import Suffixes


@dataclass(frozen=True, slots=True)
class StepKeys:
    """Keys and values that a step sees: those of step 0, and its own index's of later steps."""

    keys_TGD: Tensor
    values_TGD: Tensor
    later_keys: tuple[Tensor, ...] = ()
    later_values: tuple[Tensor, ...] = ()

    @property
    def step(self) -> int:
        return len(self.later_keys)

    def cut(self, rows: slice) -> "StepKeys":
        """Those of some tokens."""
        return StepKeys(
            self.keys_TGD[rows],
            self.values_TGD[rows],
            tuple(keys[rows] for keys in self.later_keys),
            tuple(values[rows] for values in self.later_values),
        )

    def extended(self, keys_TGD: Tensor, values_TGD: Tensor) -> "StepKeys":
        """What the next step sees."""
        return StepKeys(
            self.keys_TGD,
            self.values_TGD,
            (*self.later_keys, keys_TGD),
            (*self.later_values, values_TGD),
        )


def attend_step_plain(
    query_THD: Tensor, seen: StepKeys, documents: Documents, spec: AttentionSpec
) -> Tensor:
    """Every score of every pair of tokens of a document, written out; returns [T, H, D]."""
    outputs = [
        _attend_document(query_THD[own], seen.cut(own), spec)
        for own in (slice(start, stop) for start, stop in pairwise(documents.starts))
    ]
    return torch.cat(outputs)


def _attend_document(query_THD: Tensor, seen: StepKeys, spec: AttentionSpec) -> Tensor:
    """The whole of one document."""
    step, num_tokens = seen.step, query_THD.shape[0]
    group = query_THD.shape[1] // seen.keys_TGD.shape[1]
    wide = _wide(query_THD)
    keys_HTD = seen.keys_TGD.transpose(0, 1).repeat_interleave(group, dim=0)
    values_HTD = seen.values_TGD.transpose(0, 1).repeat_interleave(group, dim=0)
    products_HTT = query_THD.transpose(0, 1) @ keys_HTD.transpose(1, 2)
    is_seen_TT = _visible(num_tokens, spec, step, query_THD.device)
    columns = [products_HTT.to(wide).masked_fill(~is_seen_TT, -torch.inf)]
    shown_values = []
    for later, (keys_TGD, values_TGD) in enumerate(
        zip(seen.later_keys, seen.later_values, strict=True), start=1
    ):
        if spec.window is not None and step - later >= spec.window:
            continue
        own_THD = keys_TGD.repeat_interleave(group, dim=1)
        columns.append((query_THD * own_THD).to(wide).sum(dim=-1).T[..., None])
        shown_values.append(values_TGD.repeat_interleave(group, dim=1))
    scores_HTS = torch.cat(columns, dim=-1) * spec.scale
    probs_HTS = scores_HTS.softmax(dim=-1).to(values_HTD.dtype)
    out_THD = (probs_HTS[..., :num_tokens] @ values_HTD).transpose(0, 1)
    for number, values_THD in enumerate(shown_values, start=num_tokens):
        out_THD = out_THD + probs_HTS[..., number].T[..., None] * values_THD
    return out_THD


def _visible(num_tokens: int, spec: AttentionSpec, step: int, device: torch.device) -> Tensor:
    """[T, T]: which step-0 keys an index sees."""
    positions_T = torch.arange(num_tokens, device=device)
    distance_TT = positions_T[:, None] - positions_T[None, :]
    if spec.window is None:
        return distance_TT >= 0
    return (distance_TT >= 0) & (distance_TT + step < spec.window)


def attend_step(
    query_AHD: Tensor, seen: StepKeys, suffixes: Suffixes, spec: AttentionSpec
) -> Tensor:
    """The same for the ends of documents, without keeping any score; returns [A, H, D].

    Later keys and values are those of the ends only, as the queries are.
    """
    step, window = seen.step, spec.window
    # Keys of the earliest steps may lie outside a window that is shorter than the chain.
    first = 0 if window is None else max(0, step - window)
    flash = None
    if window is None or step < window:
        reach = None if window is None else window - 1 - step
        flash = DocumentFlash(suffixes, scale=spec.scale, reach=reach)
    later = (*seen.later_keys[first:], *seen.later_values[first:])
    out_AHD: Tensor = _AttendStep.apply(  # type: ignore[no-untyped-call]
        flash, spec.scale, query_AHD.contiguous(), seen.keys_TGD, seen.values_TGD, *later
    )
    return out_AHD


class _AttendStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        flash: DocumentFlash | None,
        scale: float,
        query_AHD: Tensor,
        keys_TGD: Tensor,
        values_TGD: Tensor,
        *later: Tensor,
    ) -> Tensor:
        if flash is None:
            lse_HA = query_AHD.new_full(query_AHD.shape[1::-1], -torch.inf, dtype=_wide(query_AHD))
            attended = Attended(torch.zeros_like(query_AHD), lse_HA)
        else:
            attended = flash.forward(query_AHD, keys_TGD, values_TGD)
        if later:
            attended = merge(query_AHD, attended, *_stacked(later), scale)
        ctx.flash, ctx.scale = flash, scale
        ctx.save_for_backward(query_AHD, keys_TGD, values_TGD, *attended, *later)
        return attended.out_AHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_AHD,) = grads
        query_AHD, keys_TGD, values_TGD, out_AHD, lse_HA, *later = ctx.saved_tensors
        merged = Attended(out_AHD, lse_HA)
        own_grads: tuple[Tensor, Tensor | None, Tensor | None]
        if ctx.flash is None:
            own_grads = (torch.zeros_like(query_AHD), None, None)
        else:
            own_grads = ctx.flash.backward(grad_AHD, query_AHD, keys_TGD, values_TGD, merged)
        if not later:
            return (None, None, *own_grads)
        merge_grads = merge_backward(
            grad_AHD,
            query_AHD,
            merged,
            *_stacked(later),
            ctx.scale,
            query_grad_THD=own_grads[0],
        )
        query_grad_AHD, keys_grad_SAGD, values_grad_SAGD = merge_grads
        later_grads = (*keys_grad_SAGD.unbind(), *values_grad_SAGD.unbind())
        return (None, None, query_grad_AHD, *own_grads[1:], *later_grads)


def _stacked(later: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values [S, A, G, D] of later steps, which come as S keys and then S values."""
    half = len(later) // 2
    return torch.stack(tuple(later[:half])), torch.stack(tuple(later[half:]))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
