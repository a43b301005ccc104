"""How large each tapped feature is, so that the fusion's weights learn at one pace.

Some channels of a target are hundreds of times larger than others. AdamW moves every weight by
about the learning rate, so without care the fused state is moved mostly by the large channels, and
the gradient's norm is theirs alone. The weights of a channel are therefore learned in units of its
size: as if the features were divided by it first, with heads and checkpoints as they always are.

Sizes are powers of two: weights go into the unit and back without a single bit lost.

Legend: T tokens, F tapped features.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.models.head import Eagle3Head
from fledge.training.order import choose
from fledge.training.sources import Source

_MOST_SAMPLES = 64
_ENOUGH_TOKENS = 4096
_SMALLEST_SHARE = 2.0**-10
"""Of the middle channel's size: what a channel that is nearly always zero counts as."""


@torch.no_grad()
def measure_sizes(head: Eagle3Head, source: Source, positions: NDArray[np.int64]) -> Tensor:
    """Of every number that the head's fusion reads, on a few of the samples."""
    chosen = choose(positions, _MOST_SAMPLES, seed=0)
    ends = np.cumsum(source.samples.lengths[chosen])
    enough = 1 + int(np.searchsorted(ends, _ENOUGH_TOKENS))
    batch = source.put(source.load([int(position) for position in chosen[:enough]]))
    features_TF = batch.features_TF[_is_taught(batch.loss_mask_T)].to(head.fc.weight.dtype)
    return power_of_two_sizes(head.fusion_input(features_TF))


def _is_taught(loss_mask_T: Tensor) -> Tensor:
    """Inside of answers: from there something is asked for, so stored features have them too."""
    is_said_T = loss_mask_T.bool()
    is_taught_T = torch.zeros_like(is_said_T)
    is_taught_T[:-2] = is_said_T[:-2] & is_said_T[1:-1] & is_said_T[2:]
    return is_taught_T


@torch.no_grad()
def power_of_two_sizes(features_TF: Tensor) -> Tensor:
    """The median size of each channel: first tokens that are a thousand times larger do not count.

    A power of two, in float32.
    """
    # Samples that are no numbers are found, and named, when they are trained on.
    usable_TF = features_TF[features_TF.isfinite().all(dim=1)]
    if not len(usable_TF):
        return torch.ones(features_TF.shape[1], device=features_TF.device)
    sizes_F = usable_TF.float().abs().median(dim=0).values
    middle = sizes_F.median().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.exp2(torch.log2(sizes_F.clamp(min=middle * _SMALLEST_SHARE)).round())
