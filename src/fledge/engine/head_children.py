"""What a head proposes below each node: its most probable tokens, or those best under noise.

Above temperature 0 the noise that decides what the target says is known beforehand, and a draft
that takes it into account is right more often (`ops/noised_top.py`). That is for the rule that
decides by this noise alone: one that flips coins of its own is exact only for drafts that know
nothing of them.

Legend: B requests, T rows of a pass, D hidden size.
"""

from collections.abc import Sequence as Many
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.engine.calibration import Calibration
from fledge.engine.sequence import Sequence
from fledge.models.head import Eagle3Head
from fledge.ops.draft_level import Proposal
from fledge.ops.noised_top import Draws, noised_top, num_candidates
from fledge.ops.staging import send
from fledge.ops.top_logprobs import top_logprobs


class Modes(NamedTuple):
    """Which requests are above temperature 0, and with what noise; None for nobody."""

    sampled_B: Tensor
    draws: Draws | None


def draws_of(sequences: Many[Sequence], device: torch.device) -> Draws | None:
    """How these requests sample; None where all are greedy."""
    params = [seq.request.params for seq in sequences]
    if all(one.is_greedy for one in params):
        return None
    whole = [
        [not one.is_greedy for one in params],
        [one.seed for one in params],
        [len(seq.output_ids) for seq in sequences],
        [one.top_k for one in params],
    ]
    numbers = [
        [1.0 if one.is_greedy else one.temperature for one in params],
        [one.top_p for one in params],
        [one.min_p for one in params],
    ]
    sampled_B, seed_B, position_B, top_k_B = send(whole, device)
    return Draws(
        sampled_B.bool(), seed_B, position_B, top_k_B, *send(numbers, device, torch.float64)
    )


class HeadChildren:
    """Children of one head."""

    def __init__(self, head: Eagle3Head, calibration: Calibration) -> None:
        self._head, self._calibration = head, calibration

    def below(self, normed_TD: Tensor, width: int, depth: int, modes: Modes) -> Proposal:
        """The best children of each row, which are at the given depth."""
        logits_TV, to_target_V = self._head.logits(normed_TD), self._head.draft_to_target_V
        if modes.draws is None:
            top = top_logprobs(logits_TV, width)
        else:
            top = top_logprobs(logits_TV, num_candidates(width, logits_TV.shape[1]))
            top = noised_top(top, to_target_V, modes.draws, depth=depth, width=width)
        calibration, sampled_B = self._calibration, modes.sampled_B
        return Proposal(
            top,
            to_target_V,
            sampled_B,
            calibration.maps(depth),
            lambda logprobs_BC: calibration.apply(logprobs_BC, depth, sampled_B),
        )
