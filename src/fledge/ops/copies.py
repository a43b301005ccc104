"""Chains of drafts that are copied from what requests have said before.

Where the newest tokens of a text stood once already, what followed there often comes next. A head
is asked all the same: its first draft says whether to believe the copy.

    text    ... def area ( self , radius ) : ...... def area ( self
                                └───┬────┘                         └ newest token
    drafts                          └──────────────────────────────> , radius ) :

The longest match counts, of equal ones the latest. A match may reach into what it is matched with:
a text that goes in circles goes on in them. How often copies are right is learned as it is for a
head's drafts, by maps of their own.

Legend: B requests, C candidates of a chain, N numbers of a text, P blocks of a table, S slots,
M sampling modes or lengths of a match, D depths, K knots of a map.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels
from fledge.ops.paged import BlockTables
from fledge.ops.tree import Candidates

LEAST_MATCH, MOST_MATCH = 6, 16
"""Newest tokens that must have stood there before, and how many are looked at."""

_UNSURE, _UNSURE_BESIDE_MOST = 0.5, 0.9
"""A head that drafts something else is overruled below this: by any match, by the longest."""

_SHARES_BY_MATCH = ((LEAST_MATCH, 0.83), (8, 0.89), (12, 0.93), (MOST_MATCH, 0.97))
"""Copied tokens that are right once those before them are, from some match on: a first guess."""

SHARE_ALONE = 0.47
"""The same for a first token that the head did not draft."""

NUM_HEAD_MODES = 2
"""Maps of copies come behind those of a head, in the same order of sampling modes."""

_MOST_CHECKED = 4
"""Requests by which a kernel's first result is judged."""

KEY_BITS = 32
"""A match as one number: its length, then where it ends."""


class Text(NamedTuple):
    """What requests have said, on the device."""

    tokens_S: Tensor
    """Token at each slot; of a request all but the newest."""

    tables: BlockTables
    window: int | None
    """Whose slots these are."""

    lens_B: Tensor
    newest_B: Tensor

    @property
    def table_BP(self) -> Tensor:
        return self.tables.by_window[self.window]

    @property
    def block_size(self) -> int:
        return self.tables.block_size


class Copies(NamedTuple):
    """What followed where the newest tokens of each request stood before."""

    match_B: Tensor
    """Tokens that are the same in both places; 0 where they are too few."""

    tokens_BC: Tensor


class DepthMaps(NamedTuple):
    """Piecewise linear maps of log-probabilities, by sampling mode and depth."""

    knots_K: Tensor
    lines_MD2S: Tensor
    """Offset and slope of each piece."""


class CopiedChains(NamedTuple):
    """Chains of which some are copied."""

    candidates: Candidates
    is_copied_B: Tensor


def limit_of(match_len: int) -> float:
    """How sure a head must be of a first draft of its own to be followed."""
    return _UNSURE_BESIDE_MOST if match_len >= MOST_MATCH else _UNSURE


def probabilities_of(match_len: int, count: int, *, is_agreed: bool) -> list[float]:
    """How probable each copied token is behind those before it, as far as matches say."""
    share = _share_of(match_len)
    return [share if is_agreed else SHARE_ALONE, *[share] * (count - 1)][:count]


def _share_of(match_len: int) -> float:
    shares = [share for least, share in _SHARES_BY_MATCH if match_len >= least]
    return shares[-1] if shares else SHARE_ALONE


@cache
def rule_by_match(device: torch.device) -> Tensor:
    """Limits, and shares of tokens that are right, as logarithms, by the length of a match: [2, M].

    Made once and never let go: a captured graph may have read it.
    """
    lengths = range(MOST_MATCH + 1)
    limits = [math.log(limit_of(length)) for length in lengths]
    shares = [math.log(_share_of(length)) for length in lengths]
    return torch.tensor([limits, shares], dtype=torch.float32, device=device)


def copy_chains(
    candidates: Candidates, text: Text, sampled_B: Tensor, maps: DepthMaps
) -> CopiedChains:
    """The chains of a head, and copies in place of some of them."""

    def plain() -> CopiedChains:
        copies = find_copies(text, candidates.tokens_BC.shape[1])
        return prefer_copies(candidates, copies, sampled_B, maps)

    if not uses_kernels(text.lens_B):
        return plain()

    def fused() -> CopiedChains:
        from fledge.ops.copies_triton import copy_rows

        with on_device(text.lens_B):
            return copy_rows(candidates, text, sampled_B, maps)

    def is_right(found: CopiedChains) -> bool:
        return are_right(found, candidates, text, sampled_B, maps)

    kind = candidates.tokens_BC.shape[1]
    return run_kernel("copied drafts", fused, plain, kind=kind, is_right=is_right)


def are_right(
    found: CopiedChains, candidates: Candidates, text: Text, sampled_B: Tensor, maps: DepthMaps
) -> bool:
    """Whether a kernel found what plain operations do, by the first requests.

    Those look at every place of a table at once: of many requests with long ones they would take
    more memory than a device has left.
    """
    few_B = torch.arange(min(_MOST_CHECKED, len(text.lens_B)), device=text.lens_B.device)
    few = text._replace(
        tables=text.tables[few_B], lens_B=text.lens_B[few_B], newest_B=text.newest_B[few_B]
    )
    copies = find_copies(few, candidates.tokens_BC.shape[1])
    expected = prefer_copies(_rows_of(candidates, few_B), copies, sampled_B[few_B], maps)
    ours, theirs = _rows_of(found.candidates, few_B), expected.candidates
    return (
        torch.equal(found.is_copied_B[few_B], expected.is_copied_B)
        and torch.equal(ours.tokens_BC, theirs.tokens_BC)
        and torch.allclose(ours.scores_BC, theirs.scores_BC, atol=1e-3)
        and torch.allclose(ours.logprobs_BC, theirs.logprobs_BC, atol=1e-3)
    )


def _rows_of(candidates: Candidates, rows_B: Tensor) -> Candidates:
    return Candidates(
        candidates.tokens_BC[rows_B],
        candidates.scores_BC[rows_B],
        candidates.logprobs_BC[rows_B],
        candidates.parents_BC[rows_B],
    )


def find_copies(text: Text, count: int) -> Copies:
    """So many tokens of each request to go on with."""
    num_blocks, size = text.table_BP.shape[1], text.block_size
    device, last_B1 = text.lens_B.device, text.lens_B[:, None] - 1
    numbers_N = torch.arange(num_blocks * size, device=device)
    blocks_BN = text.table_BP.repeat_interleave(size, dim=1)
    slots_BN = blocks_BN.clamp(min=0) * size + numbers_N % size
    is_old_BN = (numbers_N < last_B1) & (blocks_BN >= 0)
    tokens_BN = text.tokens_S.view(-1)[slots_BN].masked_fill(~is_old_BN, -1)
    tokens_BN = torch.where(numbers_N == last_B1, text.newest_B[:, None], tokens_BN)
    match_BN, is_same_BN = torch.zeros_like(tokens_BN), is_old_BN
    for back in range(MOST_MATCH):
        before_BN = torch.nn.functional.pad(tokens_BN, (back, 0), value=-1)[:, : len(numbers_N)]
        wanted_B1 = tokens_BN.gather(1, (last_B1 - back).clamp(min=0))
        is_same_BN = is_same_BN & (before_BN == wanted_B1) & (before_BN >= 0) & (last_B1 >= back)
        match_BN += is_same_BN
    best_B = ((match_BN << KEY_BITS) + numbers_N).amax(dim=1)
    match_B, start_B1 = best_B >> KEY_BITS, (best_B & ((1 << KEY_BITS) - 1))[:, None] + 1
    counted_C = torch.arange(count, device=device)
    places_BC = start_B1 + counted_C % (last_B1 + 1 - start_B1).clamp(min=1)
    tokens_BC = tokens_BN.gather(1, places_BC.clamp(max=len(numbers_N) - 1))
    return Copies(match_B * (match_B >= LEAST_MATCH), tokens_BC)


def prefer_copies(
    candidates: Candidates, copies: Copies, sampled_B: Tensor, maps: DepthMaps
) -> CopiedChains:
    """Copies where the head agrees with them or is unsure, and how probable they are."""
    match_B, firsts_B = copies.match_B, candidates.logprobs_BC[:, 0]
    limits_B, shares_B = rule_by_match(match_B.device)[:, match_B]
    is_agreed_B = copies.tokens_BC[:, 0] == candidates.tokens_BC[:, 0]
    is_copied_B = (match_B > 0) & (is_agreed_B | (firsts_B < limits_B))
    logprobs_BC = shares_B[:, None].repeat(1, copies.tokens_BC.shape[1])
    logprobs_BC[:, 0].masked_fill_(~is_agreed_B, math.log(SHARE_ALONE))
    scores_BC = _mapped(logprobs_BC, sampled_B, maps).cumsum(dim=1)
    pairs = (
        (copies.tokens_BC, candidates.tokens_BC),
        (scores_BC, candidates.scores_BC),
        (logprobs_BC, candidates.logprobs_BC),
    )
    tokens_BC, scores_BC, logprobs_BC = (
        torch.where(is_copied_B[:, None], copied, own) for copied, own in pairs
    )
    chains = Candidates(tokens_BC, scores_BC, logprobs_BC, candidates.parents_BC)
    return CopiedChains(chains, is_copied_B)


def _mapped(logprobs_BC: Tensor, sampled_B: Tensor, maps: DepthMaps) -> Tensor:
    """Calibrated log-probabilities of copied tokens given those before them."""
    num_depths, count = maps.lines_MD2S.shape[1], logprobs_BC.shape[1]
    depths_C = torch.arange(count, device=logprobs_BC.device).clamp(max=num_depths - 1)
    lines_BC2S = maps.lines_MD2S[(NUM_HEAD_MODES + sampled_B.long())[:, None], depths_C]
    pieces_BC1 = torch.bucketize(logprobs_BC, maps.knots_K)[:, :, None]
    offset_BC1, slope_BC1 = (lines.gather(2, pieces_BC1) for lines in lines_BC2S.unbind(2))
    return torch.addcmul(offset_BC1, slope_BC1, logprobs_BC[:, :, None]).clamp(max=0.0)[:, :, 0]
