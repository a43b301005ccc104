"""Logprobs of emitted tokens, as the target itself gives them.

They are the log-softmax of the raw logits of the node that chose a token: before rules, temperature
and filters. So they say the same whether a token was drafted or not.

Legend: B requests, A of them that ask, R rows of logits, V vocabulary, L levels walked, K most
probable tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.contracts.outputs import TokenLogprobs
from fledge.contracts.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class WalkLogprobs:
    """Logprobs of what a walk emitted, float32; zeros for requests that did not ask."""

    chosen_BL: Tensor
    top_ids_BLK: Tensor
    top_values_BLK: Tensor


def walk_logprobs(
    logits_RV: Tensor, rows_BL: Tensor, tokens_BL: Tensor, asking_A: Tensor, num_top: int
) -> WalkLogprobs:
    """For the requests that ask, at the rows of the nodes they visited."""
    num_requests, num_levels = tokens_BL.shape
    num_top = min(num_top, logits_RV.shape[-1])
    found = WalkLogprobs(
        chosen_BL=torch.zeros(tokens_BL.shape, device=logits_RV.device),
        top_ids_BLK=tokens_BL.new_zeros(num_requests, num_levels, num_top),
        top_values_BLK=torch.zeros(num_requests, num_levels, num_top, device=logits_RV.device),
    )
    # Level by level: all visited rows at once would be a large copy of the logits.
    for level in range(num_levels):
        logits_AV = logits_RV[rows_BL[asking_A, level]].float()
        total_A1 = logits_AV.logsumexp(dim=-1, keepdim=True)
        chosen_A1 = logits_AV.gather(1, tokens_BL[asking_A, level, None]) - total_A1
        top = logits_AV.topk(num_top, dim=-1)
        found.chosen_BL[asking_A, level] = chosen_A1[:, 0]
        found.top_ids_BLK[asking_A, level] = top.indices
        found.top_values_BLK[asking_A, level] = top.values - total_A1
    return found


def read_logprobs(
    logprobs: WalkLogprobs, tokens: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[tuple[TokenLogprobs, ...] | None]:
    """On the host, for the emitted tokens of each request; None for those that did not ask."""
    chosen = logprobs.chosen_BL.tolist()
    top_ids, top_values = logprobs.top_ids_BLK.tolist(), logprobs.top_values_BLK.tolist()
    found: list[tuple[TokenLogprobs, ...] | None] = []
    for row, (emitted, one) in enumerate(zip(tokens, params, strict=True)):
        if one.logprobs is None:
            found.append(None)
            continue
        num_top = one.logprobs
        found.append(
            tuple(
                TokenLogprobs(
                    token_id=token_id,
                    logprob=chosen[row][level],
                    top=tuple(
                        zip(
                            top_ids[row][level][:num_top],
                            top_values[row][level][:num_top],
                            strict=True,
                        )
                    ),
                )
                for level, token_id in enumerate(emitted)
            )
        )
    return found
