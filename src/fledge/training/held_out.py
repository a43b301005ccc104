"""What a head is worth on text it did not learn from, measured as training measures itself."""

from collections.abc import Iterable

import torch
from torch import nn

from fledge.ops.micro_batch import MicroBatch
from fledge.training.step_sums import StepSums, add_sums, no_sums


@torch.no_grad()
def measure_held_out(
    module: nn.Module, batches: Iterable[MicroBatch], *, num_steps: int
) -> StepSums:
    """Sums over micro-batches, without noise and without gradients; training goes on as before."""
    was_training = module.training
    module.eval()
    try:
        parts = []
        for batch in batches:
            # Losses are summed apart from what they will be divided by.
            ones_K = torch.ones(num_steps, device=batch.features_TF.device)
            parts.append(module(batch, ones_K).sums)
        return add_sums(parts) if parts else no_sums(num_steps)
    finally:
        module.train(was_training)
