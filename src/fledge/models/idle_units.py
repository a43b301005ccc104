"""MLP units of a head that do nothing, and the same head without them.

Weight decay shrinks what the loss does not ask for: of a wide MLP some units end with weights that
are all but zero. They move no draft, yet every draft would read them.
"""

import dataclasses

import torch
from torch import Tensor

from fledge.models.head import Eagle3Head

_MLP = "midlayer.mlp."
_WIDTHS_OF = 64
"""Widths are multiples of this, as kernels and rounded formats of all engines like them."""

_IDLE_SHARE = 1e-6
"""Of the strongest unit: what adds no more to an output is lost in bfloat16 many times over."""


def without_idle_units(head: Eagle3Head) -> Eagle3Head:
    """The head without units that do nothing; the head itself where that would save nothing.

    The rest is shared, in the order in which it was.
    """
    weights = head.state_dict()
    strength_U = _strengths(weights)
    if not strength_U.isfinite().all():  # nothing can be told of such a head
        return head
    num_busy = int((strength_U > _IDLE_SHARE * strength_U.max()).sum())
    width = max(1, -(-num_busy // _WIDTHS_OF)) * _WIDTHS_OF
    if width >= len(strength_U):
        return head
    kept_U = strength_U.topk(width).indices.sort().values
    for name in ("gate_proj", "up_proj"):
        weights[f"{_MLP}{name}.weight"] = weights[f"{_MLP}{name}.weight"][kept_U]
    down = f"{_MLP}down_proj.weight"
    weights[down] = weights[down][:, kept_U].contiguous()
    with torch.device("meta"):
        slim = Eagle3Head(dataclasses.replace(head.config, intermediate_size=width))
    slim.load_state_dict(weights, strict=True, assign=True)
    slim.draft_to_target_V, slim.common_V = head.draft_to_target_V, head.common_V
    slim.own_embedding = head.own_embedding
    return slim.eval()


def _strengths(weights: dict[str, Tensor]) -> Tensor:
    """How much each unit can add to an output at most, up to the size of what it reads."""
    gate_UD, up_UD, down_DU = (
        weights[f"{_MLP}{name}.weight"].double() for name in ("gate_proj", "up_proj", "down_proj")
    )
    strengths_U: Tensor = gate_UD.norm(dim=1) * up_UD.norm(dim=1) * down_DU.norm(dim=0)
    return strengths_U
