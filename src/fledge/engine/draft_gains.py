"""What drafting less would have yielded, from the candidates of one cycle.

The expected number of accepted drafts is the sum of the path probabilities of the verified nodes.
Candidates of a wide, deep draft contain those of narrower, shallower ones, so one cycle tells it
for every smaller depth, width and number of nodes. Scores are counted into bins instead of sorted
for each combination, and nothing here waits for the device.

Legend: B requests, C candidates, D levels, P width presets, S score bins, G node grid.
"""

from functools import lru_cache

import torch
from torch import Tensor

from fledge.ops.tree import Candidates

NODE_GRID = (
    *(1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0),
    *(12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0, 512.0, 1024.0),
)
"""Verified nodes per request for which gains are computed; between them a line is good enough."""

_ENOUGH_REQUESTS = 64
_NUM_BINS = 32
_BIN_SIZE = 0.2
"""In log-probability; the last bin holds everything below."""


def width_presets(width: int) -> tuple[int, ...]:
    """Powers of two below the width, then the width itself."""
    return (*(2**i for i in range((width - 1).bit_length())), width)


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A tensor that is sent to the device once."""
    return torch.tensor(values, device=device)


def expected_gains(candidates: Candidates, *, depth: int, width: int) -> Tensor:
    """Expected accepted drafts per request, [D, P, G]; candidates are laid out as by TreeLevels.

    Entry [d - 1, p, g] is for depth d, the p-th width preset and `NODE_GRID[g]` nodes a request,
    handed to the best candidates of the whole batch. Of many requests a part is looked at; those
    without a candidate that could be right have no drafts, and count for nothing.
    """
    stride = -(-candidates.scores_BC.shape[0] // _ENOUGH_REQUESTS)
    scores_BC = candidates.scores_BC[::stride].float()
    num_presets = len(width_presets(width))
    presets_P = _constant(width_presets(width), scores_BC.device)
    needed_BC = _needed_widths(candidates.parents_BC[::stride], depth, width)
    bin_BC = (scores_BC.clamp(min=-1e4) / -_BIN_SIZE).long().clamp_(0, _NUM_BINS - 1)
    bin_BC += torch.searchsorted(presets_P, needed_BC) * _NUM_BINS
    bin_BC += _first_bins(depth, width, scores_BC.device)
    has_drafts_B = scores_BC.amax(dim=1) > float("-inf")
    is_counted_BC = has_drafts_B[:, None].expand_as(scores_BC).float()
    counted_2X = torch.stack([is_counted_BC, scores_BC.exp()]).flatten(1)
    sums_2X = counted_2X.new_zeros(2, depth * num_presets * _NUM_BINS)
    sums_2X.index_add_(1, bin_BC.flatten(), counted_2X)
    sums = sums_2X.view(2, depth, num_presets, _NUM_BINS)
    num_DPS, mass_DPS = sums.cumsum(dim=1).cumsum(dim=2).cumsum(dim=3)
    num_requests = has_drafts_B.sum().clamp(min=1)
    grid_G = _constant(NODE_GRID, scores_BC.device) * num_requests
    return _interpolate(num_DPS, mass_DPS, grid_G) / num_requests


@lru_cache(maxsize=64)
def _first_bins(depth: int, width: int, device: torch.device) -> Tensor:
    """Where the bins of each candidate's level begin, [C]."""
    levels = [0] * width + [level for level in range(1, depth) for _ in range(width * width)]
    return torch.tensor(levels, device=device) * (len(width_presets(width)) * _NUM_BINS)


@lru_cache(maxsize=64)
def _own_widths(width: int, device: torch.device) -> Tensor:
    """What the children of each frontier node need by their own and their parent's rank, [C]."""
    place_W = torch.arange(1, width + 1, device=device)
    return torch.maximum(place_W.repeat(width), place_W.repeat_interleave(width))


def _needed_widths(parents_BC: Tensor, depth: int, width: int) -> Tensor:
    """The smallest width at which each candidate would have been scored, [B, C].

    Children come in falling order, frontier nodes too: a candidate needs as much width as its rank
    among its siblings, its parent's place in the frontier, and its parent's own need.
    """
    needed_BC = torch.empty_like(parents_BC)
    needed_BC[:, :width] = torch.arange(1, width + 1, device=parents_BC.device)
    own_C = _own_widths(width, parents_BC.device)
    for first in range(width, width + (depth - 1) * width**2, width**2):
        level = slice(first, first + width**2)
        above_BC = needed_BC.gather(1, parents_BC[:, level])
        torch.maximum(above_BC, own_C, out=needed_BC[:, level])
    return needed_BC


def _interpolate(num_DPS: Tensor, mass_DPS: Tensor, grid_G: Tensor) -> Tensor:
    """Mass of the best nodes, as many as the grid says, [D, P, G]."""
    zero_DP1 = torch.zeros_like(num_DPS[..., :1])
    num_DPS = torch.cat([zero_DP1, num_DPS], dim=-1)
    mass_DPS = torch.cat([zero_DP1, mass_DPS], dim=-1)
    wanted_DPG = grid_G.expand(*num_DPS.shape[:-1], -1).contiguous()
    upper_DPG = torch.searchsorted(num_DPS, wanted_DPG).clamp(1, _NUM_BINS)
    num_below, num_above = num_DPS.gather(-1, upper_DPG - 1), num_DPS.gather(-1, upper_DPG)
    below, above = mass_DPS.gather(-1, upper_DPG - 1), mass_DPS.gather(-1, upper_DPG)
    share_DPG = ((wanted_DPG - num_below) / (num_above - num_below).clamp(min=1e-6)).clamp(max=1.0)
    return below + share_DPG * (above - below)
