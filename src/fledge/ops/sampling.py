"""From logits to the target's token: temperature, top-k, top-p, min-p, then Gumbel noise.

Filters are applied in transformers' order and with its rules for ties, per row, since the requests
of a batch need not agree. What a row does not ask for it does not pay for: rows are grouped by the
filters they use, and greedy ones are in no group.

Legend: B rows (requests), S rows of a group, V vocabulary, A rows that ask for logprobs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.contracts.sampling import SamplingParams
from fledge.ops.noise import gumbel
from fledge.ops.portions import portions

_SAMPLE_STREAM = 0


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of a batch that are sampled with the same filters, and their parameters as columns."""

    rows_S: Tensor
    temperature_S: Tensor
    seed_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    min_p_S: Tensor
    largest_top_k: int
    """0 when no row asks for top-k; known on the host, so that no device value is waited for."""

    has_top_p: bool
    has_min_p: bool

    def take(self, index_I: Tensor) -> "SampledRows":
        """Some of the rows."""
        return SampledRows(
            rows_S=self.rows_S[index_I],
            temperature_S=self.temperature_S[index_I],
            seed_S=self.seed_S[index_I],
            top_k_S=self.top_k_S[index_I],
            top_p_S=self.top_p_S[index_I],
            min_p_S=self.min_p_S[index_I],
            largest_top_k=self.largest_top_k,
            has_top_p=self.has_top_p,
            has_min_p=self.has_min_p,
        )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the rows of a batch choose their tokens."""

    greedy_B: Tensor
    temperature_B: Tensor
    """1 for greedy rows."""

    seed_B: Tensor
    sampled: tuple[SampledRows, ...]
    """Groups of the rows that are not greedy; a greedy row among them stays greedy."""

    asking_A: Tensor | None
    """Rows that ask for logprobs, None when there are none."""

    num_logprobs: int
    """The most alternatives that a row asks for."""

    @property
    def all_greedy(self) -> bool:
        return not self.sampled

    @property
    def has_filters(self) -> bool:
        return any(one.largest_top_k or one.has_top_p or one.has_min_p for one in self.sampled)


def make_sampling_batch(params: Sequence[SamplingParams], device: torch.device) -> SamplingBatch:
    groups: dict[tuple[bool, bool, bool], dict[int, SamplingParams]] = {}
    for row, one in enumerate(params):
        if not one.is_greedy:
            filters = (one.top_k > 0, one.top_p < 1, one.min_p > 0)
            groups.setdefault(filters, {})[row] = one
    asking = [row for row, one in enumerate(params) if one.logprobs is not None]
    return SamplingBatch(
        greedy_B=torch.tensor([one.is_greedy for one in params], device=device),
        temperature_B=torch.tensor(
            [1.0 if one.is_greedy else one.temperature for one in params],
            dtype=torch.float64,
            device=device,
        ),
        seed_B=torch.tensor([one.seed for one in params], dtype=torch.long, device=device),
        sampled=tuple(_make_group(group, device) for group in groups.values()),
        asking_A=torch.tensor(asking, device=device) if asking else None,
        num_logprobs=max((one.logprobs or 0 for one in params), default=0),
    )


def _make_group(group: dict[int, SamplingParams], device: torch.device) -> SampledRows:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    params = list(group.values())
    return SampledRows(
        rows_S=column(list(group), torch.long),
        temperature_S=column([one.temperature for one in params], torch.float64),
        seed_S=column([one.seed for one in params], torch.long),
        top_k_S=column([one.top_k for one in params], torch.long),
        top_p_S=column([one.top_p for one in params], torch.float64),
        min_p_S=column([one.min_p for one in params], torch.float64),
        largest_top_k=max(one.top_k for one in params),
        has_top_p=params[0].top_p < 1,
        has_min_p=params[0].min_p > 0,
    )


def process_logits(logits_SV: Tensor, rows: SampledRows) -> Tensor:
    """Log-weights of the processed distribution, float64, -inf where a filter removed a token."""
    logits_SV = logits_SV.double()
    # Against the best logit first: a tiny temperature then makes -inf, never inf - inf.
    best_S1 = logits_SV.amax(dim=-1, keepdim=True)
    scores_SV = (logits_SV - best_S1) / rows.temperature_S[:, None]
    if rows.largest_top_k:
        scores_SV = _keep_top_k(scores_SV, rows.top_k_S, rows.largest_top_k)
    if rows.has_top_p:
        scores_SV = _keep_top_p(scores_SV, rows.top_p_S)
    if rows.has_min_p:
        scores_SV = _keep_min_p(scores_SV, rows.min_p_S)
    return scores_SV


def processed_portions(
    logits_BV: Tensor, batch: SamplingBatch, wanted_B: Tensor | None = None
) -> Iterator[tuple[SampledRows, Tensor]]:
    """Sampled rows with their log-weights; rows that are not wanted may be left out."""
    for group in batch.sampled:
        for index_I in portions(group.rows_S, logits_BV.shape[-1], wanted_B):
            rows = group.take(index_I)
            yield rows, process_logits(logits_BV[rows.rows_S], rows)


def _keep_top_k(scores_SV: Tensor, top_k_S: Tensor, largest_top_k: int) -> Tensor:
    """Ties with the k-th score stay, as in transformers; rows that ask for none keep everything."""
    num_ranked = min(largest_top_k, scores_SV.shape[-1])
    ranked_SK = scores_SV.topk(num_ranked, dim=-1).values
    kth_S1 = (top_k_S.clamp(1, num_ranked) - 1)[:, None]
    is_below_SV = (scores_SV < ranked_SK.gather(1, kth_S1)) & (top_k_S > 0)[:, None]
    return scores_SV.masked_fill(is_below_SV, float("-inf"))


def _keep_top_p(scores_SV: Tensor, top_p_S: Tensor) -> Tensor:
    ascending_SV, order_SV = scores_SV.sort(dim=-1, stable=True)
    below_SV = ascending_SV.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p_S[:, None]
    below_SV[:, -1] = False
    removed_SV = torch.zeros_like(below_SV).scatter(1, order_SV, below_SV)
    return scores_SV.masked_fill(removed_SV, float("-inf"))


def _keep_min_p(scores_SV: Tensor, min_p_S: Tensor) -> Tensor:
    probs_SV = scores_SV.softmax(dim=-1)
    floor_S1 = min_p_S[:, None] * probs_SV.amax(dim=-1, keepdim=True)
    return scores_SV.masked_fill(probs_SV < floor_S1, float("-inf"))


def sample(
    logits_BV: Tensor, batch: SamplingBatch, position_B: Tensor, wanted_B: Tensor | None = None
) -> Tensor:
    """The target's token for each row at its output position; knows nothing about drafts.

    Rows that are not wanted get some token.
    """
    token_B = logits_BV.argmax(dim=-1)
    for rows, scores_SV in processed_portions(logits_BV, batch, wanted_B):
        where_S = position_B[rows.rows_S]
        noise_SV = gumbel(rows.seed_S, where_S, logits_BV.shape[-1], _SAMPLE_STREAM)
        drawn_S = (scores_SV + noise_SV).argmax(dim=-1)
        is_greedy_S = batch.greedy_B[rows.rows_S]
        token_B[rows.rows_S] = torch.where(is_greedy_S, token_B[rows.rows_S], drawn_S)
    return token_B
