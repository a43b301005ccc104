"""The pass of plain decoding: the newest token of each request, one row each.

Legend: B requests, M lines of newest tokens, P blocks of a table.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.kernel_choice import on_device, run_kernel, uses_kernels
from fledge.ops.paged import BlockTables, TreePass, make_tree_pass


class Ends(NamedTuple):
    """Where requests end, and what they said last."""

    rows_B: Tensor
    """Of the tables of all requests."""

    lens_B: Tensor
    """Tokens, the newest included."""

    fresh_B: Tensor
    """How many of the newest tokens are in `tokens_MB`, one at least; the newest is the last."""

    tokens_MB: Tensor


class RootRows(NamedTuple):
    """What a kernel makes of them."""

    tokens_B: Tensor
    positions_B: Tensor
    context_B: Tensor
    slots_B: Tensor
    table_BP: Tensor


def make_root_pass(ends: Ends, all_tables: BlockTables, last_position: int) -> TreePass:
    """A pass over the newest tokens; nodes past `last_position` are never committed."""

    def plain() -> TreePass:
        newest_1B = ends.tokens_MB.gather(0, ends.fresh_B[None] - 1)
        return make_tree_pass(
            chain_tokens_C=newest_1B[0],
            chain_B=torch.ones_like(ends.lens_B),
            context_B=ends.lens_B - 1,
            trees=None,
            num_rows=ends.lens_B.shape[0],
            tables=all_tables[ends.rows_B],
            num_short=ends.lens_B.shape[0],
            last_position=last_position,
        )

    # With tables for several windows a row has several slots.
    if len(all_tables.by_window) > 1 or not uses_kernels(ends.lens_B):
        return plain()
    ((window, table_RP),) = all_tables.by_window.items()

    def fused() -> TreePass:
        from fledge.ops.root_pass_triton import find_roots

        with on_device(ends.lens_B):
            found = find_roots(ends, table_RP, all_tables.block_size, last_position)
        places_B, ones_B, zeros_B = _constants(ends.lens_B.shape[0], ends.lens_B.device)
        return TreePass(
            token_ids_T=found.tokens_B,
            positions_T=found.positions_B,
            request_T=places_B,
            numbers_T=found.context_B,
            starts_B=places_B,
            num_rows_B=ones_B,
            context_B=found.context_B,
            chain_B=ones_B,
            seen_BNN=None,
            tables=BlockTables(all_tables.block_size, {window: found.table_BP}),
            num_short=ends.lens_B.shape[0],
            first_B=zeros_B,
            write_slots_T=found.slots_B,
        )

    def is_right(packed: TreePass) -> bool:
        return all(map(torch.equal, parts_of(packed, window), parts_of(plain(), window)))

    kind = (all_tables.block_size, ends.lens_B.shape[0].bit_length())
    return run_kernel("rows of newest tokens", fused, plain, kind=kind, is_right=is_right)


def parts_of(packed: TreePass, window: int | None) -> tuple[Tensor, ...]:
    """What a pass says of its rows, and in trees who sees whom."""
    slots_T, table_BP = packed.view(window).write_slots_T, packed.tables.by_window[window]
    rows = (packed.token_ids_T, packed.positions_T, packed.request_T, packed.numbers_T, slots_T)
    lengths = (packed.starts_B, packed.num_rows_B, packed.context_B, packed.chain_B, packed.first_B)
    seen = () if packed.seen_BNN is None else (packed.seen_BNN,)
    return *rows, *lengths, table_BP, *seen


@cache
def _constants(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Places, ones and zeros. Made once and never let go: a captured graph may have read them."""
    places_B = torch.arange(size, device=device)
    return places_B, torch.ones_like(places_B), torch.zeros_like(places_B)
