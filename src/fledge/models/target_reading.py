"""What a target makes of whole documents, and how its final hidden states become logits.

Legend: T tokens, R rows, F tapped features, D hidden size, V vocabulary, C tokens asked for.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class TargetReading(NamedTuple):
    features_TF: Tensor
    """Tapped residual streams side by side, in the order of the taps."""

    final_TD: Tensor
    """Hidden states behind the last norm: what the output matrix reads."""


@dataclass(frozen=True, slots=True)
class Readout:
    """The output matrix, and what the family does to logits."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None

    def logits(self, final_RD: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logits [R, V] of final hidden states, or [R, C] of the tokens whose ids are given."""
        weight, bias = self.weight_VD, self.bias_V
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        return self.shaped(F.linear(final_RD, weight, bias))

    def shaped(self, logits: Tensor) -> Tensor:
        """What the family does to the matrix product."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits


def logit_scale(config: Any) -> float:
    """What a family multiplies its logits with, by its (text) config."""
    divisor = getattr(config, "logits_scaling", None) or 1.0
    factor = getattr(config, "logit_scale", None) or 1.0
    return float(factor) / float(divisor)


def readout_of(model: Any) -> Readout:
    """As the model's config describes it; `check_reading` compares it with what the model does."""
    matrix, config = model.get_output_embeddings(), model.config.get_text_config()
    soft_cap = getattr(config, "final_logit_softcapping", None)
    bias_V = getattr(matrix, "bias", None)
    return Readout(
        weight_VD=matrix.weight.detach(),
        bias_V=None if bias_V is None else bias_V.detach(),
        scale=logit_scale(config),
        soft_cap=float(soft_cap) if soft_cap else None,
    )
