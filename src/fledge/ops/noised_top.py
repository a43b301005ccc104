"""Children for requests above temperature 0: the best of a head's guesses under the target's noise.

The target's token at output position p is argmax(log p + noise), and the noise is a function of
(seed, p, token id) that anybody can compute. So a drafter need not guess what the target may say,
but what it says with this noise: the tokens with the largest log q + noise. A walk still accepts
only what equals the target's own sample, so nothing here can change a text.

The rule, for a row of a request above temperature 0, and a child at depth d (1 below a root):

1. Take the K most probable tokens of the head, falling, K = `num_candidates(width, vocabulary)`.
2. s[k] = (log q[k] - log q[0]) / temperature.
3. Filters on that list, as the target has them on its own distribution: k < top_k; the mass before
   k, of what top_k keeps of the list, is below top_p (1 drops nothing); exp(s[k]) >= min_p. The
   first always stays. What a filter drops is lowered by `DROPPED`: the target may keep it.
4. n[k] = s[k] + gumbel(seed, tokens said + d - 1, target's id of k).
5. Children are the `width` largest n, falling, the first among equals. What they are given as
   log-probability is log softmax(n / `SCALE`) over the list: how sure it is that the target's own
   largest is the same.

Rows of greedy requests, and of those with a top-k of 1, have the most probable tokens with their
log-probabilities. Penalties, biases and grammars are left out of account.

Legend: B requests, T rows (as many for each request), K candidates, W children.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels
from fledge.ops.noise import gumbel_of
from fledge.ops.top_logprobs import TopLogprobs

_CANDIDATES, _CANDIDATES_PER_CHILD, _MOST_CANDIDATES = 16, 4, 64
"""Of a chain, of each child of a tree, and of all: more than these hardly help."""

SCALE = 1.5
"""What the head does not know of the target, as noise of its own: 1 is surer than it is right."""

DROPPED = 2.0
"""As much as still lets the target differ: a filter that drops for good has fewer right."""

_LOWEST = -1e300
"""Below every value that can be told from another."""


class Draws(NamedTuple):
    """How requests sample, and where they stand."""

    sampled_B: Tensor
    seed_B: Tensor
    position_B: Tensor
    """Tokens said."""

    top_k_B: Tensor
    temperature_B: Tensor
    """Any positive number for greedy requests; float64, as the two below."""

    top_p_B: Tensor
    min_p_B: Tensor


def num_candidates(width: int, vocab_size: int) -> int:
    """How many of a head's guesses are looked at for so many children."""
    wanted = max(_CANDIDATES, min(_CANDIDATES_PER_CHILD * width, _MOST_CANDIDATES), width)
    return min(wanted, vocab_size)


def noised_top(
    top: TopLogprobs, draft_to_target_V: Tensor, draws: Draws, *, depth: int, width: int
) -> TopLogprobs:
    """The children of each row among its candidates, falling; indices are the head's."""

    def noised_plain() -> TopLogprobs:
        return _noised_plain(top, draft_to_target_V, draws, depth, width)

    count = top.logprobs_TK.shape[1]
    if not (count <= _MOST_CANDIDATES and uses_kernels(top.logprobs_TK)):
        return noised_plain()

    def noised_fused() -> TopLogprobs:
        from fledge.ops.noised_top_triton import noised_rows

        with on_device(top.logprobs_TK):
            return TopLogprobs(
                *noised_rows(
                    top,
                    draft_to_target_V,
                    draws,
                    depth=depth,
                    width=width,
                    scale=SCALE,
                    dropped=DROPPED,
                )
            )

    def is_right(found: TopLogprobs) -> bool:
        wanted = noised_plain()
        is_near = torch.allclose(found.logprobs_TK, wanted.logprobs_TK, atol=1e-3, equal_nan=True)
        return is_near and torch.equal(found.indices_TK, wanted.indices_TK)

    kind = (count, width)
    return run_kernel(
        "drafts under noise", noised_fused, noised_plain, kind=kind, is_right=is_right
    )


def _noised_plain(
    top: TopLogprobs, draft_to_target_V: Tensor, draws: Draws, depth: int, width: int
) -> TopLogprobs:
    logprobs_TK, indices_TK = top
    num_rows = logprobs_TK.shape[0] // draws.seed_B.shape[0]
    rows = Draws(*(one_B.repeat_interleave(num_rows) for one_B in draws))
    kept_TK = _filtered(logprobs_TK.double(), rows)
    tokens_TK = draft_to_target_V[indices_TK]
    noised_TK = kept_TK + gumbel_of(rows.seed_B, rows.position_B + depth - 1, tokens_TK)
    noised_TK = noised_TK.clamp(min=_LOWEST)
    scores_TK = (noised_TK / SCALE).log_softmax(dim=1).float()
    # Logits that are no numbers are so in a whole row: its order does not matter.
    order_TK = noised_TK.sort(dim=1, descending=True, stable=True).indices
    first_K = torch.arange(order_TK.shape[1], device=order_TK.device)
    is_drawn_T1 = (rows.sampled_B & (rows.top_k_B != 1))[:, None]
    order_TW = torch.where(is_drawn_T1, order_TK, first_K)[:, :width]
    scores_TK = torch.where(is_drawn_T1, scores_TK, logprobs_TK)
    return TopLogprobs(scores_TK.gather(1, order_TW), indices_TK.gather(1, order_TW))


def _filtered(logprobs_TK: Tensor, rows: Draws) -> Tensor:
    """Log-weights under temperatures and filters, against the best of each row."""
    weights_TK = (logprobs_TK - logprobs_TK[:, :1]) / rows.temperature_B[:, None]
    first_K = torch.arange(weights_TK.shape[1], device=weights_TK.device)
    top_k_T1, top_p_T1 = rows.top_k_B[:, None], rows.top_p_B[:, None]
    is_beyond_TK = (top_k_T1 > 0) & (first_K >= top_k_T1)
    shares_TK = weights_TK.exp()
    ranked_TK = shares_TK.masked_fill(is_beyond_TK, 0.0)
    before_TK, total_T1 = ranked_TK.cumsum(dim=1) - ranked_TK, ranked_TK.sum(dim=1, keepdim=True)
    is_dropped_TK = is_beyond_TK | (shares_TK < rows.min_p_B[:, None])
    is_dropped_TK |= (before_TK >= top_p_T1 * total_T1) & (top_p_T1 < 1)
    is_dropped_TK[:, 0] = False
    return torch.where(is_dropped_TK, weights_TK - DROPPED, weights_TK)
