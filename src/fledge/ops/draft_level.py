"""One level of draft trees: scoring the children a head proposed, and whom to expand next.

Level 1 holds the W best children of the root, and all are expanded. Each further level scores W
children of each of W frontier nodes and expands the W most probable of those W x W paths; a tie
goes to whom comes first.

Legend: B requests, W tree width, R frontier nodes that were asked for children, C = R x W
candidates of a level, S scratch entries of the head's cache, T = B x R rows, M sampling modes, K
knots of a map, V draft vocabulary.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels
from fledge.ops.top_logprobs import TopLogprobs

_MOST_WIDTH = 32


class Maps(NamedTuple):
    """Piecewise linear maps of log-probabilities at one depth, by sampling mode."""

    knots_K: Tensor
    lines_M2S: Tensor
    """Offset and slope of each piece."""


class Frontier(NamedTuple):
    """Nodes that are expanded next."""

    tokens_T: Tensor
    rows_T: Tensor
    """Row of each node's parent in the head pass that proposed it."""

    scores_BW: Tensor
    nodes_BW: Tensor
    """Number of each among all candidates."""

    visible_BWS: Tensor
    """Which scratch entries each sees: its ancestors and itself."""


class Level(NamedTuple):
    tokens_BC: Tensor
    scores_BC: Tensor
    logprobs_BC: Tensor
    parents_BC: Tensor
    frontier: Frontier


class Proposal(NamedTuple):
    """What a head proposes below a frontier."""

    top: TopLogprobs
    draft_to_target_V: Tensor
    sampled_B: Tensor
    maps: Maps | None
    """None where a kernel cannot calibrate."""

    calibrate: Callable[[Tensor], Tensor]
    """The maps by plain operations, over [B, C]."""


def known_children(tokens: Tensor, logprobs: Tensor, calibrated: Tensor) -> Proposal:
    """Children that are calibrated already: [B, W] below roots, [B, W, W] below a frontier."""
    num_requests, width = tokens.shape[0], tokens.shape[-1]
    tokens_X = tokens.flatten()
    places_TK = torch.arange(tokens_X.shape[0], device=tokens.device).view(-1, width)
    top = TopLogprobs(logprobs.reshape(-1, width), places_TK)
    sampled_B = torch.zeros(num_requests, dtype=torch.bool, device=tokens.device)
    return Proposal(top, tokens_X, sampled_B, None, lambda _: calibrated.flatten(1))


def score_level(proposal: Proposal, above: Frontier | None, num_before: int) -> Level:
    """The next level below `above`, None for the roots; so many candidates came before it."""

    def score_plain() -> Level:
        return _score_plain(proposal, above, num_before)

    top, maps = proposal.top, proposal.maps
    is_small = top.logprobs_TK.shape[1] <= _MOST_WIDTH
    if maps is None or not (is_small and uses_kernels(top.logprobs_TK)):
        return score_plain()

    def score_fused() -> Level:
        from fledge.ops.draft_level_triton import score_rows

        with on_device(top.logprobs_TK):
            return score_rows(proposal, maps, above, num_before)

    def is_right(found: Level) -> bool:
        # Of equal paths either may be expanded.
        wanted = score_plain()
        pairs = (
            (found.scores_BC, wanted.scores_BC),
            (found.logprobs_BC, wanted.logprobs_BC),
            (found.frontier.scores_BW, wanted.frontier.scores_BW),
        )
        is_same = torch.equal(found.tokens_BC, wanted.tokens_BC)
        return is_same and all(torch.allclose(*pair, atol=1e-3) for pair in pairs)

    kind = (top.logprobs_TK.shape[1], above is None)
    return run_kernel("levels of drafts", score_fused, score_plain, kind=kind, is_right=is_right)


def _score_plain(proposal: Proposal, above: Frontier | None, num_before: int) -> Level:
    top, width = proposal.top, proposal.top.logprobs_TK.shape[1]
    num_requests = proposal.sampled_B.shape[0]
    # Neither rounding nor a head that overflows may lift a child above its parent.
    logprobs_BC = top.logprobs_TK.clamp(max=0.0).nan_to_num(nan=float("-inf"))
    logprobs_BC = logprobs_BC.view(num_requests, -1)
    tokens_BC = proposal.draft_to_target_V[top.indices_TK].view(num_requests, -1)
    scores_BC = proposal.calibrate(logprobs_BC)
    if above is None:
        frontier = Frontier(
            tokens_BC.flatten(),
            first_rows(num_requests, width, tokens_BC.device),
            scores_BC,
            _numbers(num_requests, width, tokens_BC.device),
            _own(num_requests, width, tokens_BC.device),
        )
        parents_BC = _no_parents(num_requests, width, tokens_BC.device)
        return Level(tokens_BC, scores_BC, logprobs_BC, parents_BC, frontier)
    if width == 1:
        return _score_chain(above, tokens_BC, scores_BC, logprobs_BC, num_before)
    scores_BC = (above.scores_BW[:, :, None] + scores_BC.view(-1, width, width)).flatten(1)
    parents_BC = above.nodes_BW.repeat_interleave(width, dim=1)
    best = scores_BC.sort(dim=1, descending=True, stable=True)
    chosen_BW = best.indices[:, :width]
    local_BW = chosen_BW // width
    rows_BWS = local_BW[:, :, None].expand(-1, -1, above.visible_BWS.shape[-1])
    own_BWW = _own(num_requests, width, tokens_BC.device)
    frontier = Frontier(
        tokens_BC.gather(1, chosen_BW).flatten(),
        (local_BW + _first_of_requests(num_requests, width, tokens_BC.device)).flatten(),
        best.values[:, :width],
        chosen_BW + num_before,
        torch.cat([above.visible_BWS.gather(1, rows_BWS), own_BWW], dim=2),
    )
    return Level(tokens_BC, scores_BC, logprobs_BC, parents_BC, frontier)


def _score_chain(
    above: Frontier, tokens_B1: Tensor, scores_B1: Tensor, logprobs_B1: Tensor, num_before: int
) -> Level:
    """Of one child nothing is left to choose."""
    num_requests, device = tokens_B1.shape[0], tokens_B1.device
    scores_B1 = above.scores_BW + scores_B1
    frontier = Frontier(
        tokens_B1.flatten(),
        first_rows(num_requests, 1, device),
        scores_B1,
        _all_of(num_before, num_requests, device),
        _seen_by_all(num_requests, num_before + 1, device),
    )
    return Level(tokens_B1, scores_B1, logprobs_B1, above.nodes_BW, frontier)


# Constants are made once and never let go: a captured graph may have read them.


@cache
def first_rows(num_requests: int, width: int, device: torch.device) -> Tensor:
    """The row of each node's request, where requests have one row each, [T]."""
    return torch.arange(num_requests, device=device).repeat_interleave(width)


@cache
def _first_of_requests(num_requests: int, width: int, device: torch.device) -> Tensor:
    """The first row of each request, where requests have as many rows as trees are wide."""
    return (torch.arange(num_requests, device=device) * width)[:, None]


@cache
def _numbers(num_requests: int, width: int, device: torch.device) -> Tensor:
    return torch.arange(width, device=device).repeat(num_requests, 1)


@cache
def _no_parents(num_requests: int, width: int, device: torch.device) -> Tensor:
    return torch.full((num_requests, width), -1, device=device)


@cache
def _own(num_requests: int, width: int, device: torch.device) -> Tensor:
    return torch.eye(width, dtype=torch.bool, device=device).repeat(num_requests, 1, 1)


@cache
def _all_of(number: int, num_requests: int, device: torch.device) -> Tensor:
    return torch.full((num_requests, 1), number, device=device)


@cache
def _seen_by_all(num_requests: int, num_scratch: int, device: torch.device) -> Tensor:
    return torch.ones(num_requests, 1, num_scratch, dtype=torch.bool, device=device)
