"""From logits to the target's token: temperature, top-k, top-p, min-p, then Gumbel noise.

Filters are applied in transformers' order and with its rules for ties, per row, since the requests
of a batch need not agree. Legend: B rows (requests), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.contracts.sampling import SamplingParams
from fledge.ops.noise import gumbel

_SAMPLE_STREAM = 0


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of a batch as columns."""

    greedy_B: Tensor
    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor
    all_greedy: bool
    largest_top_k: int
    """0 when no row asks for top-k; known on the host, so that no device value is waited for."""

    has_top_p: bool
    has_min_p: bool
    asking_A: Tensor | None
    """Rows that ask for logprobs, None when there are none."""

    num_logprobs: int
    """The most alternatives that a row asks for."""


def make_sampling_batch(params: Sequence[SamplingParams], device: torch.device) -> SamplingBatch:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    asking = [row for row, one in enumerate(params) if one.logprobs is not None]
    return SamplingBatch(
        greedy_B=torch.tensor([p.is_greedy for p in params], device=device),
        # Greedy rows are divided by 1: their filtered logits are never looked at.
        temperature_B=column([p.temperature or 1.0 for p in params], torch.float64),
        top_k_B=column([p.top_k for p in params], torch.long),
        top_p_B=column([p.top_p for p in params], torch.float64),
        min_p_B=column([p.min_p for p in params], torch.float64),
        seed_B=column([p.seed for p in params], torch.long),
        all_greedy=all(p.is_greedy for p in params),
        largest_top_k=max(p.top_k for p in params),
        has_top_p=any(p.top_p < 1 for p in params),
        has_min_p=any(p.min_p > 0 for p in params),
        asking_A=column(asking, torch.long) if asking else None,
        num_logprobs=max((p.logprobs or 0 for p in params), default=0),
    )


def process_logits(logits_BV: Tensor, batch: SamplingBatch) -> Tensor:
    """Log-weights of the processed distribution, float64, -inf where a filter removed a token."""
    logits_BV = logits_BV.double()
    # Against the best logit first: a tiny temperature then makes -inf, never inf - inf.
    best_B1 = logits_BV.amax(dim=-1, keepdim=True)
    scores_BV = (logits_BV - best_B1) / batch.temperature_B[:, None]
    if batch.largest_top_k:
        scores_BV = _keep_top_k(scores_BV, batch.top_k_B, batch.largest_top_k)
    if batch.has_top_p:
        scores_BV = _keep_top_p(scores_BV, batch.top_p_B)
    if batch.has_min_p:
        scores_BV = _keep_min_p(scores_BV, batch.min_p_B)
    return scores_BV


def _keep_top_k(scores_BV: Tensor, top_k_B: Tensor, largest_top_k: int) -> Tensor:
    """Ties with the k-th score stay, as in transformers."""
    num_ranked = min(largest_top_k, scores_BV.shape[-1])
    ranked_BK = scores_BV.topk(num_ranked, dim=-1).values
    kth_B1 = (top_k_B.clamp(min=1, max=num_ranked) - 1)[:, None]
    is_cut_B1 = (top_k_B > 0)[:, None]
    return scores_BV.masked_fill(
        is_cut_B1 & (scores_BV < ranked_BK.gather(1, kth_B1)), float("-inf")
    )


def _keep_top_p(scores_BV: Tensor, top_p_B: Tensor) -> Tensor:
    ascending_BV, order_BV = scores_BV.sort(dim=-1, stable=True)
    below_BV = ascending_BV.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p_B[:, None]
    below_BV &= top_p_B[:, None] < 1
    below_BV[:, -1] = False
    removed_BV = torch.zeros_like(below_BV).scatter(1, order_BV, below_BV)
    return scores_BV.masked_fill(removed_BV, float("-inf"))


def _keep_min_p(scores_BV: Tensor, min_p_B: Tensor) -> Tensor:
    probs_BV = scores_BV.softmax(dim=-1)
    floor_B1 = min_p_B[:, None] * probs_BV.amax(dim=-1, keepdim=True)
    return scores_BV.masked_fill(probs_BV < floor_B1, float("-inf"))


def sample(logits_BV: Tensor, batch: SamplingBatch, position_B: Tensor) -> Tensor:
    """The target's token for each row at its output position; knows nothing about drafts."""
    greedy_B = logits_BV.argmax(dim=-1)
    if batch.all_greedy:
        return greedy_B
    noise_BV = gumbel(batch.seed_B, position_B, logits_BV.shape[-1], _SAMPLE_STREAM)
    sampled_B = (process_logits(logits_BV, batch) + noise_BV).argmax(dim=-1)
    return torch.where(batch.greedy_B, greedy_B, sampled_B)
