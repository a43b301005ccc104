"""Attention of training-time test: what a head sees that has drafted k tokens.

At step k an index sees the step-0 keys of its document up to itself, which serving made of true
features, and one key of each later step, its own: those that serving made of guesses.

    step 2, index 3        step-0 keys  0 1 2 3        keys of steps 1 and 2, of index 3 only
    positions                           1 2 3 4                              5 6

A window counts positions: at step k the step-0 keys are k positions further away.

Legend: T tokens, H query heads, G key heads, D head size, K draft steps so far.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.ops.attention import AttentionSpec
from fledge.ops.documents import Documents


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
    """Every score of every pair of tokens, written out; returns [T, H, D]."""
    step, group = seen.step, query_THD.shape[1] // seen.keys_TGD.shape[1]
    wide = torch.promote_types(query_THD.dtype, torch.float32)
    query_HTD = query_THD.transpose(0, 1)
    keys_HTD = seen.keys_TGD.transpose(0, 1).repeat_interleave(group, dim=0)
    values_HTD = seen.values_TGD.transpose(0, 1).repeat_interleave(group, dim=0)
    scores_HTT = (query_HTD @ keys_HTD.transpose(1, 2)).to(wide) * spec.scale
    scores_HTT = scores_HTT.masked_fill(~_visible(documents, spec, step), -torch.inf)
    columns_HT, shown_values = [], []
    for later, (keys_TGD, values_TGD) in enumerate(
        zip(seen.later_keys, seen.later_values, strict=True), start=1
    ):
        if spec.window is not None and step - later >= spec.window:
            continue
        own_THD = keys_TGD.repeat_interleave(group, dim=1)
        columns_HT.append((query_THD * own_THD).to(wide).sum(dim=-1).T * spec.scale)
        shown_values.append(values_TGD.repeat_interleave(group, dim=1))
    all_HTS = torch.cat([scores_HTT, *[column[..., None] for column in columns_HT]], dim=-1)
    probs_HTS = all_HTS.softmax(dim=-1).to(values_HTD.dtype)
    out_THD = (probs_HTS[..., : query_THD.shape[0]] @ values_HTD).transpose(0, 1)
    for number, values_THD in enumerate(shown_values, start=query_THD.shape[0]):
        out_THD = out_THD + probs_HTS[..., number].T[..., None] * values_THD
    return out_THD


def _visible(documents: Documents, spec: AttentionSpec, step: int) -> Tensor:
    """[T, T]: which step-0 keys an index sees."""
    numbers_T, positions_T = documents.numbers_T, documents.positions_T
    distance_TT = positions_T[:, None] - positions_T[None, :]
    visible_TT = (numbers_T[:, None] == numbers_T[None, :]) & (distance_TT >= 0)
    if spec.window is not None:
        visible_TT &= distance_TT + step < spec.window
    return visible_TT
