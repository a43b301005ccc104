"""The kernel of `noised_top`: a program for each row, which holds all its candidates.

Legend: T rows, K candidates, W children.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.noise_triton import gumbel_at, noise_base
from fledge.ops.paged_shape import power_of_two

if TYPE_CHECKING:
    from fledge.ops.noised_top import Draws
    from fledge.ops.top_logprobs import TopLogprobs

_LOWEST = tl.constexpr(-1.0e300)
"""Below every value that can be told from another, above what was taken already."""


@triton.jit
def _kept(
    logprobs_K, places_K, is_there_K, temperature, top_k, top_p, min_p, DROPPED: tl.constexpr
):
    """Log-weights against the best, under temperature and filters."""
    best = tl.sum(tl.where(places_K == 0, logprobs_K, 0.0), axis=0)
    weights_K = (logprobs_K - best) / temperature
    is_beyond_K = (top_k > 0) & (places_K >= top_k)
    shares_K = tl.where(is_there_K, tl.exp(weights_K), 0.0)
    ranked_K = tl.where(is_beyond_K, 0.0, shares_K)
    before_K = tl.cumsum(ranked_K, axis=0) - ranked_K
    most = tl.where(top_p < 1.0, top_p * tl.sum(ranked_K, axis=0), float("inf"))
    is_dropped_K = is_beyond_K | (shares_K < min_p) | (before_K >= most)
    return tl.where(is_dropped_K & (places_K > 0), weights_K - DROPPED, weights_K)


@triton.jit(do_not_specialize=["rows_each", "num_candidates", "depth"])
def _noised_kernel(
    logprobs_ptr,
    indices_ptr,
    to_target_ptr,
    sampled_ptr,
    seed_ptr,
    position_ptr,
    top_k_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    front_scores_ptr,
    front_tokens_ptr,
    rows_each,
    num_candidates,
    depth,
    SCALE: tl.constexpr,
    DROPPED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = row // rows_each
    places_K = tl.arange(0, BLOCK)
    is_there_K = places_K < num_candidates
    from_K = row * num_candidates + places_K
    logprobs_K = tl.load(logprobs_ptr + from_K, mask=is_there_K, other=float("-inf"))
    columns_K = tl.load(indices_ptr + from_K, mask=is_there_K, other=0)
    to_K = row * WIDTH + places_K
    top_k = tl.load(top_k_ptr + request)
    if (tl.load(sampled_ptr + request) == 0) | (top_k == 1):
        tl.store(front_scores_ptr + to_K, logprobs_K, mask=places_K < WIDTH)
        tl.store(front_tokens_ptr + to_K, columns_K, mask=places_K < WIDTH)
        return
    weights_K = _kept(
        logprobs_K.to(tl.float64),
        places_K,
        is_there_K,
        tl.load(temperature_ptr + request),
        top_k,
        tl.load(top_p_ptr + request),
        tl.load(min_p_ptr + request),
        DROPPED,
    )
    tokens_K = tl.load(to_target_ptr + columns_K, mask=is_there_K, other=0)
    position = tl.load(position_ptr + request) + depth - 1
    base = noise_base(tl.load(seed_ptr + request), position)
    noised_K = weights_K + gumbel_at(base, tokens_K)
    is_number_K = noised_K == noised_K
    left_K = tl.where(is_number_K, tl.maximum(noised_K, _LOWEST), _LOWEST)
    left_K = tl.where(is_there_K, left_K, float("-inf"))
    largest = tl.max(left_K, axis=0)
    # Of logits that are no numbers the sum is none, and no child has a probability.
    parts_K = tl.where(is_there_K, tl.exp((noised_K - largest) / SCALE), 0.0)
    log_total = largest / SCALE + tl.log(tl.sum(parts_K, axis=0))
    for rank in range(WIDTH):
        best = tl.max(left_K, axis=0)
        chosen = tl.min(tl.where(left_K == best, places_K, BLOCK), axis=0)
        is_chosen_K = places_K == chosen
        column = tl.sum(tl.where(is_chosen_K, columns_K, 0), axis=0)
        tl.store(front_scores_ptr + row * WIDTH + rank, (best / SCALE - log_total).to(tl.float32))
        tl.store(front_tokens_ptr + row * WIDTH + rank, column)
        left_K = tl.where(is_chosen_K, float("-inf"), left_K)


def noised_rows(
    top: "TopLogprobs",
    draft_to_target_V: Tensor,
    draws: "Draws",
    *,
    depth: int,
    width: int,
    scale: float,
    dropped: float,
) -> tuple[Tensor, Tensor]:
    """The twin is `noised_top` by plain operations."""
    logprobs_TK, indices_TK = top
    num_rows, num_candidates = logprobs_TK.shape
    scores_TW = logprobs_TK.new_empty(num_rows, width)
    chosen_TW = indices_TK.new_empty(num_rows, width)
    _noised_kernel[(num_rows,)](
        logprobs_TK,
        indices_TK,
        draft_to_target_V,
        draws.sampled_B.view(torch.uint8),
        draws.seed_B,
        draws.position_B,
        draws.top_k_B,
        draws.temperature_B,
        draws.top_p_B,
        draws.min_p_B,
        scores_TW,
        chosen_TW,
        num_rows // draws.seed_B.shape[0],
        num_candidates,
        depth,
        SCALE=scale,
        DROPPED=dropped,
        WIDTH=width,
        BLOCK=max(16, power_of_two(num_candidates)),
        num_warps=1,
    )
    return scores_TW, chosen_TW
