"""Passes of a head, laid out in few operations.

Legend: B requests, L tokens a request may say in one cycle, W tree width, T rows of a pass, E
levels that are expanded.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.engine.sequence import Sequence
from fledge.engine.steady_batch import SteadyBatch
from fledge.ops.draft_level import Frontier, first_rows
from fledge.ops.paged import BlockTables, FrontierPass, TreePass, make_tree_pass
from fledge.ops.staging import send

_FEW_ROWS = 64
"""Requests that read no more than this are attended together."""


class Reading(NamedTuple):
    """A pass over committed tokens, and where the features before them are."""

    packed: TreePass
    before_T: Tensor


def share_rows(
    behind: Many[Sequence], stops: Mapping[Sequence, int], num_rows: int
) -> tuple[list[Sequence], list[int]]:
    """Who reads in the next pass of so many rows, and up to where; the first are served first."""
    batch: list[Sequence] = []
    new_lens: list[int] = []
    for seq in behind:
        count = min(stops[seq] - seq.head_len, num_rows)
        if count > 0:
            batch.append(seq)
            new_lens.append(seq.head_len + count)
            num_rows -= count
    return batch, new_lens


def unread_pass(
    sequences: Many[Sequence], new_lens: Many[int], firsts: Many[int], tables: BlockTables
) -> TreePass:
    """Tokens that the head has not read, up to new lengths; `firsts` are the oldest to look at."""
    device = next(iter(tables.by_window.values())).device
    pairs = list(zip(sequences, new_lens, strict=True))
    counts = [new - seq.head_len for seq, new in pairs]
    tokens = [token for seq, new in pairs for token in seq.token_ids[seq.head_len : new]]
    lengths = [counts, [seq.head_len for seq in sequences], firsts]
    chain_B, context_B, first_B = send(lengths, device)
    return make_tree_pass(
        chain_tokens_C=send(tokens, device),
        chain_B=chain_B,
        context_B=context_B,
        trees=None,
        num_rows=len(tokens),
        tables=tables,
        num_short=len(sequences) if max(counts) <= _FEW_ROWS else 0,
        first_B=first_B,
    )


def steady_reading(batch: SteadyBatch, tables: BlockTables, window: int | None) -> Reading:
    """As many tokens of each request as it may have said in the last cycle."""
    tokens_BL, lens_B = batch.fresh_tokens_BL, batch.lens_B
    shape = tokens_BL.shape
    request_T, starts_B, lengths_B, ones_B, places_21L = _reading_constants(*shape, lens_B.device)
    context_B = lens_B - batch.fresh_B
    numbers_2T = (context_B[:, None] + places_21L).flatten(1)
    slots_T, before_T = tables.slots(window, request_T, numbers_2T)
    numbers_T = numbers_2T[0]
    packed = TreePass(
        # Of one place, flattening leaves gaps between the tokens, and kernels take them in a row.
        token_ids_T=tokens_BL.flatten().contiguous(),
        positions_T=numbers_T,
        request_T=request_T,
        numbers_T=numbers_T,
        starts_B=starts_B,
        num_rows_B=lengths_B,
        context_B=context_B,
        chain_B=lengths_B,
        seen_BNN=None,
        tables=tables,
        num_short=batch.size,
        first_B=ones_B if window is None else (lens_B - window).clamp(min=1),
        write_slots_T=slots_T,
    )
    return Reading(packed, before_T)


class Scratch:
    """Where the nodes of each level are put while trees grow, for all levels at once."""

    def __init__(
        self, lens_B: Tensor, tables: BlockTables, window: int | None, *, width: int, depth: int
    ) -> None:
        self._lens_B, self._tables = lens_B, tables
        num_requests, device = lens_B.shape[0], lens_B.device
        levels_E1W, places_E1W = _scratch_constants(depth - 1, width, device)
        lens_B1 = lens_B[:, None]
        # Levels begin at even places: kernels are compiled anew for memory that is aligned less.
        num_rows = num_requests * width
        shape = (depth - 1, num_rows + num_rows % 2)
        padded_EX = torch.empty(shape, dtype=torch.long, device=device)
        self.positions_ET = padded_EX[:, :num_rows]
        torch.add(lens_B1, levels_E1W, out=self.positions_ET.view(-1, num_requests, width))
        numbers_ET = (lens_B1 + places_E1W).flatten(1)
        self._slots_ET = tables.slots(window, first_rows(num_requests, width, device), numbers_ET)

    def level_pass(self, frontier: Frontier, level: int) -> FrontierPass:
        """The pass over the nodes of a level, counted from 1."""
        return FrontierPass(
            token_ids_T=frontier.tokens_T,
            positions_T=self.positions_ET[level - 1],
            context_B=self._lens_B,
            level=level,
            visible_BWS=frontier.visible_BWS,
            tables=self._tables,
            first_number=1,
            write_slots_T=self._slots_ET[level - 1],
        )


# Constants are made once and never let go: a captured graph may have read them.


@cache
def own_numbers(num_nodes: int, device: torch.device) -> Tensor:
    return torch.arange(num_nodes, device=device)


@cache
def _reading_constants(size: int, num_tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    """Request of each row, first row and rows of each request, ones, and the rows' places.

    Places come twice: of the tokens, and of those before them.
    """
    request_T = first_rows(size, num_tokens, device)
    starts_B = torch.arange(size, device=device) * num_tokens
    lengths_B = torch.full_like(starts_B, num_tokens)
    places_L = torch.arange(num_tokens, device=device)
    places_21L = torch.stack([places_L, places_L - 1])[:, None]
    return request_T, starts_B, lengths_B, torch.ones_like(starts_B), places_21L


@cache
def _scratch_constants(num_levels: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """How far behind the context the nodes of each level are: in positions, and in entries."""
    levels_E = torch.arange(num_levels, device=device)
    places_E1W = torch.arange(num_levels * width, device=device).view(-1, 1, width)
    return levels_E[:, None, None].repeat(1, 1, width), places_E1W
