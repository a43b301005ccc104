"""What a pass of training-time test leaves behind to be measured: sums that just add up.

Over micro-batches and over processes alike, so that a figure never depends on how the work was cut.

Legend: K draft steps; step k of the loss is depth k+1 of a chain.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class StepSums(NamedTuple):
    """One number per draft step, all on the device of the pass, none of them differentiable."""

    loss_K: Tensor
    """Loss summed over positions, not weighted by step."""

    count_K: Tensor
    """Positions with a label."""

    correct_K: Tensor
    """Of those, where the head's best token is the target's."""

    chain_K: Tensor
    """Indices that have labels and are correct at this step and at every one before."""

    offered_K: Tensor
    """Indices that have labels up to this step and are correct at every one before it."""

    accepted_K: Tensor
    """Sum over positions of the sum of min(p, q), p over the target's whole vocabulary."""

    entropy_K: Tensor
    """Entropy of the target over the draft vocabulary: what a soft loss cannot go below."""

    def packed(self) -> Tensor:
        """All of them in one float64 tensor [fields, K]: one reduction, one copy to the host."""
        return torch.stack([one.double() for one in self])


def unpacked(sums_SK: Tensor) -> StepSums:
    """The opposite of `StepSums.packed`."""
    return StepSums(*sums_SK.unbind())


def no_sums(num_steps: int, device: torch.device | None = None) -> StepSums:
    """Where adding begins."""
    shape = (len(StepSums._fields), num_steps)
    return unpacked(torch.zeros(shape, dtype=torch.float64, device=device))


def lengthened(sums: StepSums, num_steps: int) -> StepSums:
    """With nothing at the steps that were not taken."""
    missing = num_steps - len(sums.loss_K)
    return StepSums(*(F.pad(one, (0, missing)) for one in sums)) if missing else sums


def add_sums(parts: Iterable[StepSums]) -> StepSums:
    """The sums of several micro-batches, at least one, in float64."""
    return unpacked(torch.stack([part.packed() for part in parts]).sum(dim=0))
