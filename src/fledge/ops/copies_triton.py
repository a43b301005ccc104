"""Copied drafts in two launches: where newest tokens stood before, and which chains are copied.

The first looks at a part of a request's text in each program, the second puts the parts together.

Legend: B requests, C candidates of a chain, N numbers of a text, X parts of it.
"""

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from fledge.ops.paged_shape import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

    from fledge.ops.copies import CopiedChains, DepthMaps, Text
    from fledge.ops.tree import Candidates

_NUMBERS = 1024
_MOST_PARTS = 16


@triton.jit
def _tokens_at(tokens_ptr, table_ptr, numbers, is_there, PAGE: tl.constexpr):
    """Tokens at some numbers of a text; -1 where there are none (any more)."""
    blocks = tl.load(table_ptr + numbers // PAGE, mask=is_there, other=-1)
    is_kept = is_there & (blocks >= 0)
    return tl.load(tokens_ptr + blocks * PAGE + numbers % PAGE, mask=is_kept, other=-1)


@triton.jit(do_not_specialize=["num_blocks"])
def _match_kernel(
    tokens_ptr,
    table_ptr,
    lens_ptr,
    newest_ptr,
    keys_ptr,
    num_blocks,
    PAGE: tl.constexpr,
    NUMBERS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table_ptr += request * num_blocks
    last = tl.load(lens_ptr + request) - 1
    newest = tl.load(newest_ptr + request)
    best = last * 0
    for start in range(part * NUMBERS, last, PARTS * NUMBERS):
        ends_N = (start + tl.arange(0, NUMBERS)).to(tl.int64)
        is_same_N = _tokens_at(tokens_ptr, table_ptr, ends_N, ends_N < last, PAGE) == newest
        is_same_N = is_same_N & (ends_N < last)
        if tl.max(is_same_N.to(tl.int32), axis=0) > 0:
            match_N = is_same_N.to(tl.int64)
            for back in range(1, MOST):
                wanted = _tokens_at(tokens_ptr, table_ptr, last - back, last >= back, PAGE)
                reaches_N = is_same_N & (ends_N >= back)
                before_N = _tokens_at(tokens_ptr, table_ptr, ends_N - back, reaches_N, PAGE)
                is_same_N = reaches_N & (before_N == wanted) & (before_N >= 0)
                match_N += is_same_N.to(tl.int64)
            keys_N = tl.where(match_N > 0, (match_N << KEY_BITS) + ends_N, 0)
            best = tl.maximum(best, tl.max(keys_N, axis=0))
    tl.store(keys_ptr + request * PARTS + part, best)


@triton.jit(do_not_specialize=["num_blocks", "count", "num_depths"])
def _choose_kernel(
    tokens_ptr,
    table_ptr,
    lens_ptr,
    newest_ptr,
    keys_ptr,
    rule_ptr,
    sampled_ptr,
    knots_ptr,
    lines_ptr,
    own_tokens_ptr,
    own_scores_ptr,
    own_logprobs_ptr,
    chain_tokens_ptr,
    chain_scores_ptr,
    chain_logprobs_ptr,
    is_copied_ptr,
    num_blocks,
    count,
    num_depths,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
    KNOTS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    SHARE_ALONE: tl.constexpr,
    FIRST_MODE: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    request, places_C = tl.program_id(0).to(tl.int64), tl.arange(0, COUNT)
    table_ptr += request * num_blocks
    length = tl.load(lens_ptr + request)
    best = tl.max(tl.load(keys_ptr + request * PARTS + tl.arange(0, PARTS)), axis=0)
    match, end = best >> KEY_BITS, best & ((1 << KEY_BITS) - 1)
    is_there_C = places_C < count
    numbers_C = end + 1 + places_C % tl.maximum(length - 1 - end, 1)
    is_old_C = is_there_C & (numbers_C < length - 1)
    copied_C = _tokens_at(tokens_ptr, table_ptr, numbers_C, is_old_C, PAGE)
    copied_C = tl.where(numbers_C == length - 1, tl.load(newest_ptr + request), copied_C)
    own_C = request * count + places_C
    tokens_C = tl.load(own_tokens_ptr + own_C, mask=is_there_C, other=-2)
    scores_C = tl.load(own_scores_ptr + own_C, mask=is_there_C, other=0.0)
    logprobs_C = tl.load(own_logprobs_ptr + own_C, mask=is_there_C, other=0.0)
    is_first_C = places_C == 0
    first = tl.load(own_logprobs_ptr + request * count)
    is_agreed = tl.max((is_first_C & (tokens_C == copied_C)).to(tl.int32), axis=0) > 0
    limit, share = tl.load(rule_ptr + match), tl.load(rule_ptr + MOST + 1 + match)
    is_copied = (match >= LEAST) & (is_agreed | (first < limit))
    shares_C = tl.where(is_first_C & (is_agreed == 0), SHARE_ALONE, share)
    pieces_C = tl.zeros([COUNT], tl.int32)
    for knot in range(KNOTS):
        pieces_C += (tl.load(knots_ptr + knot) < shares_C).to(tl.int32)
    mode = FIRST_MODE + (tl.load(sampled_ptr + request) != 0).to(tl.int32)
    depths_C = tl.minimum(places_C, num_depths - 1)
    lines_ptr += (mode * num_depths + depths_C) * (2 * (KNOTS + 1)) + pieces_C
    offsets_C, slopes_C = tl.load(lines_ptr), tl.load(lines_ptr + KNOTS + 1)
    mapped_C = tl.minimum(offsets_C + slopes_C * shares_C, 0.0)
    is_before_CC = places_C[None, :] <= places_C[:, None]
    paths_C = tl.sum(tl.where(is_before_CC, mapped_C[None, :], 0.0), axis=1)
    tl.store(chain_tokens_ptr + own_C, tl.where(is_copied, copied_C, tokens_C), mask=is_there_C)
    tl.store(chain_scores_ptr + own_C, tl.where(is_copied, paths_C, scores_C), mask=is_there_C)
    tl.store(chain_logprobs_ptr + own_C, tl.where(is_copied, shares_C, logprobs_C), is_there_C)
    tl.store(is_copied_ptr + request, is_copied.to(tl.uint8))


def _match_keys(text: "Text", table_BP: "Tensor") -> "Tensor":
    """The best match of each part of each text, as one number."""
    from fledge.ops import copies as rule

    num_requests, num_blocks = table_BP.shape
    parts = power_of_two(min(_MOST_PARTS, triton.cdiv(num_blocks * text.block_size, _NUMBERS)))
    keys_BX = text.lens_B.new_empty(num_requests, parts)
    _match_kernel[(num_requests, parts)](
        text.tokens_S,
        table_BP,
        text.lens_B,
        text.newest_B,
        keys_BX,
        num_blocks,
        PAGE=text.block_size,
        NUMBERS=_NUMBERS,
        PARTS=parts,
        MOST=rule.MOST_MATCH,
        KEY_BITS=rule.KEY_BITS,
        num_warps=4,
    )
    return keys_BX


def copy_rows(
    candidates: "Candidates", text: "Text", sampled_B: "Tensor", maps: "DepthMaps"
) -> "CopiedChains":
    """The twin is `prefer_copies` of what `find_copies` finds."""
    from fledge.ops import copies as rule
    from fledge.ops.tree import Candidates

    num_requests, count = candidates.tokens_BC.shape
    table_BP = text.table_BP.contiguous()
    text = text._replace(newest_B=text.newest_B.contiguous())
    keys_BX = _match_keys(text, table_BP)
    made = Candidates(
        torch.empty_like(candidates.tokens_BC),
        torch.empty_like(candidates.scores_BC),
        torch.empty_like(candidates.logprobs_BC),
        candidates.parents_BC,
    )
    is_copied_B = torch.empty(num_requests, dtype=torch.bool, device=text.lens_B.device)
    _choose_kernel[(num_requests,)](
        text.tokens_S,
        table_BP,
        text.lens_B,
        text.newest_B,
        keys_BX,
        rule.rule_by_match(text.lens_B.device),
        sampled_B.view(torch.uint8),
        maps.knots_K,
        maps.lines_MD2S,
        candidates.tokens_BC,
        candidates.scores_BC,
        candidates.logprobs_BC,
        made.tokens_BC,
        made.scores_BC,
        made.logprobs_BC,
        is_copied_B.view(torch.uint8),
        table_BP.shape[1],
        count,
        maps.lines_MD2S.shape[1],
        PAGE=text.block_size,
        PARTS=keys_BX.shape[1],
        COUNT=max(16, power_of_two(count)),
        KNOTS=maps.knots_K.shape[0],
        LEAST=rule.LEAST_MATCH,
        MOST=rule.MOST_MATCH,
        SHARE_ALONE=math.log(rule.SHARE_ALONE),
        FIRST_MODE=rule.NUM_HEAD_MODES,
        KEY_BITS=rule.KEY_BITS,
        num_warps=1,
    )
    return rule.CopiedChains(made, is_copied_B)
