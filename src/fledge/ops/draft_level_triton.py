"""A level of draft trees in one launch: a program for each request.

Legend: B requests, W tree width, R frontier nodes that were asked for children, C = R x W
candidates of a level, S scratch entries of the head's cache, T = B x R rows.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fledge.ops.paged_shape import power_of_two

if TYPE_CHECKING:
    from fledge.ops.draft_level import Frontier, Level, Maps, Proposal

_LEAST = tl.constexpr(-3.4028234663852886e38)
"""What `nan_to_num` makes of -inf."""

_LOWEST = tl.constexpr(-3.0e38)
"""Below every path that can be told from another, above what was taken already."""


@triton.jit(do_not_specialize=["num_before", "num_seen", "lines_stride"])
def _level_kernel(
    logprobs_ptr,
    indices_ptr,
    to_target_ptr,
    sampled_ptr,
    knots_ptr,
    lines_ptr,
    above_scores_ptr,
    above_nodes_ptr,
    above_seen_ptr,
    tokens_ptr,
    scores_ptr,
    kept_ptr,
    parents_ptr,
    front_tokens_ptr,
    front_rows_ptr,
    front_scores_ptr,
    front_nodes_ptr,
    front_seen_ptr,
    num_before,
    num_seen,
    lines_stride,
    KNOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEEN_BLOCK: tl.constexpr,
    HAS_ABOVE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    places_C = tl.arange(0, BLOCK)
    is_there_C = places_C < ROWS * WIDTH
    from_C = request * (ROWS * WIDTH) + places_C
    logprobs_C = tl.load(logprobs_ptr + from_C, mask=is_there_C, other=float("-inf"))
    is_number_C = logprobs_C == logprobs_C
    logprobs_C = tl.maximum(tl.minimum(logprobs_C, 0.0), _LEAST)
    logprobs_C = tl.where(is_number_C, logprobs_C, float("-inf"))
    columns_C = tl.load(indices_ptr + from_C, mask=is_there_C, other=0)
    tokens_C = tl.load(to_target_ptr + columns_C, mask=is_there_C, other=0)
    pieces_C = tl.zeros([BLOCK], tl.int32)
    for knot in range(KNOTS):
        pieces_C += (tl.load(knots_ptr + knot) < logprobs_C).to(tl.int32)
    mode = tl.where(tl.load(sampled_ptr + request) != 0, 1, 0)
    own_lines_ptr = lines_ptr + mode * lines_stride
    offsets_C = tl.load(own_lines_ptr + pieces_C)
    slopes_C = tl.load(own_lines_ptr + KNOTS + 1 + pieces_C)
    scores_C = tl.minimum(offsets_C + slopes_C * logprobs_C, 0.0)
    parents_C = tl.full([BLOCK], -1, tl.int64)
    if HAS_ABOVE:
        above_C = request * WIDTH + places_C // WIDTH
        scores_C += tl.load(above_scores_ptr + above_C, mask=is_there_C, other=0.0)
        parents_C = tl.load(above_nodes_ptr + above_C, mask=is_there_C, other=0)
    tl.store(tokens_ptr + from_C, tokens_C, mask=is_there_C)
    tl.store(scores_ptr + from_C, scores_C, mask=is_there_C)
    tl.store(kept_ptr + from_C, logprobs_C, mask=is_there_C)
    tl.store(parents_ptr + from_C, parents_C, mask=is_there_C)
    # Among equals the first is taken, as by a stable sort.
    left_C = tl.where(is_there_C, tl.maximum(scores_C, _LOWEST), float("-inf"))
    seen_S = tl.arange(0, SEEN_BLOCK)
    for rank in range(WIDTH):
        chosen = rank
        if HAS_ABOVE:
            best = tl.max(left_C, axis=0)
            chosen = tl.min(tl.where(left_C == best, places_C, BLOCK), axis=0)
            left_C = tl.where(places_C == chosen, float("-inf"), left_C)
        is_chosen_C = places_C == chosen
        parent, place = chosen // WIDTH, request * WIDTH + rank
        tl.store(front_tokens_ptr + place, tl.sum(tl.where(is_chosen_C, tokens_C, 0), axis=0))
        tl.store(front_scores_ptr + place, tl.sum(tl.where(is_chosen_C, scores_C, 0.0), axis=0))
        tl.store(front_rows_ptr + place, request * ROWS + parent)
        tl.store(front_nodes_ptr + place, (num_before + chosen).to(tl.int64))
        sees_S = (seen_S == num_seen + rank).to(tl.uint8)
        if HAS_ABOVE:
            inherited_ptr = above_seen_ptr + (request * WIDTH + parent) * num_seen
            inherited_S = tl.load(inherited_ptr + seen_S, mask=seen_S < num_seen, other=0)
            sees_S = sees_S | inherited_S
        to_ptr = front_seen_ptr + place * (num_seen + WIDTH)
        tl.store(to_ptr + seen_S, sees_S, mask=seen_S < num_seen + WIDTH)


def score_rows(
    proposal: "Proposal", maps: "Maps", above: "Frontier | None", num_before: int
) -> "Level":
    """The twin is `score_level` by plain operations."""
    from fledge.ops.draft_level import Frontier, Level

    logprobs_TK, indices_TK = proposal.top
    num_requests, width = proposal.sampled_B.shape[0], logprobs_TK.shape[1]
    num_rows = logprobs_TK.shape[0] // num_requests
    num_seen = 0 if above is None else above.visible_BWS.shape[2]
    scored = (num_requests, num_rows * width)
    tokens, parents = indices_TK.new_empty(2, *scored)
    scores, kept = logprobs_TK.new_empty(2, *scored)
    front_tokens, front_rows, front_nodes = indices_TK.new_empty(3, num_requests, width)
    front_scores = logprobs_TK.new_empty(num_requests, width)
    front_seen = torch.empty(
        (num_requests, width, num_seen + width), dtype=torch.bool, device=logprobs_TK.device
    )
    # What a kernel does not look at still needs a pointer.
    _level_kernel[(num_requests,)](
        logprobs_TK,
        indices_TK,
        proposal.draft_to_target_V,
        proposal.sampled_B.view(torch.uint8),
        maps.knots_K,
        maps.lines_M2S,
        scores if above is None else above.scores_BW.contiguous(),
        parents if above is None else above.nodes_BW.contiguous(),
        (front_seen if above is None else above.visible_BWS.contiguous()).view(torch.uint8),
        tokens,
        scores,
        kept,
        parents,
        front_tokens,
        front_rows,
        front_scores,
        front_nodes,
        front_seen.view(torch.uint8),
        num_before,
        num_seen,
        maps.lines_M2S.stride(0),
        KNOTS=maps.knots_K.shape[0],
        WIDTH=width,
        ROWS=num_rows,
        BLOCK=max(16, power_of_two(num_rows * width)),
        SEEN_BLOCK=max(16, power_of_two(num_seen + width)),
        HAS_ABOVE=above is not None,
        num_warps=1 if width <= 8 else 4,
    )
    frontier = Frontier(
        front_tokens.flatten(), front_rows.flatten(), front_scores, front_nodes, front_seen
    )
    return Level(tokens, scores, kept, parents, frontier)
