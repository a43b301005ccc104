"""What a target says about its vocabulary and about a part of it, from each row of its logits.

On CUDA one kernel reads a row once; the plain operations are its twin.

Legend: P rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels


class VocabShare(NamedTuple):
    greedy_P: Tensor
    """The most probable token, the first of equals."""

    log_part_P: Tensor
    """Log of the summed exponentials of the part, float32: its logits, divided by the temperature,
    minus this are its log-probabilities."""

    log_share_P: Tensor
    """Log of the part's share of all probability, float32, at most 0."""


def weigh_part(logits_PV: Tensor, is_part_V: Tensor, *, temperature: float = 1.0) -> VocabShare:
    """The whole vocabulary, and the part of it that `is_part` names."""

    def weigh_fused() -> VocabShare:
        from fledge.ops.vocab_share_triton import weigh_part_fused

        with on_device(logits_PV):
            return VocabShare(*weigh_part_fused(logits_PV, is_part_V, temperature))

    def weigh_plain() -> VocabShare:
        return weigh_part_plain(logits_PV, is_part_V, temperature=temperature)

    if uses_kernels(logits_PV) and len(logits_PV):
        return run_kernel("a part of the vocabulary", weigh_fused, weigh_plain)
    return weigh_plain()


def weigh_part_plain(
    logits_PV: Tensor, is_part_V: Tensor, *, temperature: float = 1.0
) -> VocabShare:
    """The same in plain operations."""
    wide_PV = logits_PV.float() / temperature
    log_all_P = wide_PV.logsumexp(dim=-1)
    log_part_P = wide_PV.masked_fill(~is_part_V, -torch.inf).logsumexp(dim=-1)
    log_share_P = (log_part_P - log_all_P).clamp_max(0.0)
    return VocabShare(logits_PV.argmax(dim=-1), log_part_P, log_share_P)
