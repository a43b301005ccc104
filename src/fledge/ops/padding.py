"""Many short requests of a pass padded to one shape, so that one call attends them all.

Legend: B requests, Q rows of the longest, K keys of the longest, T rows of the pass.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fledge.ops.packed import PaddedRequests

if TYPE_CHECKING:
    from fledge.ops.paged import FrontierPass, TreePass

_FREE_PADDING = 8192
"""Keys of padding that are not worth a loop over requests."""


def pad_tree_pass(packed: "TreePass", window: int | None) -> PaddedRequests | None:
    """The short requests side by side; None when there are too few or they differ too much."""
    count = packed.num_short
    starts_B1, rows_B1 = packed.starts_B[:count, None], packed.num_rows_B[:count, None]
    context_B1, chain_B1 = packed.context_B[:count, None], packed.chain_B[:count, None]
    keys = _padded_keys(context_B1, rows_B1, packed.first_B[:count, None], window, 1)
    if keys is None:
        return None
    numbers_BK, is_key_BK = keys
    requests_B1 = torch.arange(count, device=starts_B1.device)[:, None]
    local_BQ = torch.arange(int(rows_B1.max()), device=starts_B1.device).minimum(rows_B1 - 1)
    rows_BQ = starts_B1 + local_BQ
    local_BK = numbers_BK - context_B1
    mask_BQK = local_BK[:, None] <= local_BQ.minimum(chain_B1 - 1)[:, :, None]
    if packed.seen_BNN is not None:
        node_BQ = (local_BQ - chain_B1 + 1).clamp(min=0)
        node_BK = (local_BK - chain_B1 + 1).clamp(min=0)
        sees_BQK = packed.seen_BNN[requests_B1[:, :, None], node_BQ[:, :, None], node_BK[:, None]]
        mask_BQK = mask_BQK | (sees_BQK & (local_BK >= chain_B1)[:, None])
    if window is not None:
        new_BK = packed.positions_T[starts_B1 + local_BK.clamp(min=0)]
        positions_BK = torch.where(local_BK < 0, numbers_BK, new_BK)
        distance_BQK = packed.positions_T[rows_BQ][:, :, None] - positions_BK[:, None]
        mask_BQK = mask_BQK & (distance_BQK < window)
    num_rows = int(rows_B1.sum())
    request_T = packed.request_T[:num_rows]
    local_T = torch.arange(num_rows, device=request_T.device) - packed.starts_B[request_T]
    return PaddedRequests(
        rows_BQ=rows_BQ,
        slots_BK=packed.tables.slots(window, requests_B1, numbers_BK),
        mask_BQK=mask_BQK & is_key_BK[:, None],
        place_T=(request_T, local_T),
    )


def pad_frontier(packed: "FrontierPass", window: int | None) -> PaddedRequests | None:
    """All frontiers side by side; None when there are too few or they differ too much."""
    num_requests, width, num_scratch = packed.visible_BWS.shape
    context_B1, device = packed.context_B[:, None], packed.context_B.device
    new_B1 = torch.full_like(context_B1, num_scratch)
    first_B1 = torch.full_like(context_B1, packed.first_number)
    keys = _padded_keys(context_B1, new_B1, first_B1, window, packed.level)
    if keys is None:
        return None
    numbers_BK, is_key_BK = keys
    requests_B1 = torch.arange(num_requests, device=device)[:, None]
    rows_BQ = requests_B1 * width + torch.arange(width, device=device)
    scratch_BK = (numbers_BK - context_B1).clamp(min=0)
    is_context_BK = numbers_BK < context_B1
    sees_BQK = packed.visible_BWS.gather(2, scratch_BK[:, None].expand(-1, width, -1))
    mask_BQK = (is_context_BK[:, None] | sees_BQK) & is_key_BK[:, None]
    if window is not None:
        scratch_positions_BK = context_B1 + scratch_BK // width
        positions_BK = torch.where(is_context_BK, numbers_BK, scratch_positions_BK)
        distance_BQK = packed.positions_T[rows_BQ][:, :, None] - positions_BK[:, None]
        mask_BQK = mask_BQK & (distance_BQK < window)
    place_T = torch.arange(num_requests * width, device=device)
    return PaddedRequests(
        rows_BQ=rows_BQ,
        slots_BK=packed.tables.slots(window, requests_B1, numbers_BK),
        mask_BQK=mask_BQK,
        place_T=(place_T // width, place_T % width),
    )


def _padded_keys(
    context_B1: Tensor, new_B1: Tensor, firsts_B1: Tensor, window: int | None, level: int
) -> tuple[Tensor, Tensor] | None:
    """Token numbers of the keys, and which are not padding; None when padding would be most of it.

    `level` is how far the first query lies behind the context.
    """
    if context_B1.shape[0] < 2:
        return None
    if window is not None:
        firsts_B1 = firsts_B1.maximum(context_B1 - window + level).minimum(context_B1)
    counts_B1 = context_B1 + new_B1 - firsts_B1
    longest, total = int(counts_B1.max()), int(counts_B1.sum())
    if longest * context_B1.shape[0] > 2 * total + _FREE_PADDING:
        return None
    wanted_BK = firsts_B1 + torch.arange(longest, device=context_B1.device)
    last_B1 = firsts_B1 + counts_B1 - 1
    return wanted_BK.minimum(last_B1), wanted_BK <= last_B1
