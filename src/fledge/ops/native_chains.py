"""Chains of tokens of a few requests, laid out once for the native kernels and written in place.

Every cycle of decoding on a CPU has the same few numbers to hand over; making tensors of them each
time would take longer than reading a draft.

Legend: B requests, T rows.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.ops.native_structs import CRows, CView
from fledge.ops.paged import BlockTables


class TokenChain(NamedTuple):
    """Tokens of one request that follow on what is in the cache."""

    table_row: int
    """Its row in the block tables."""

    context: int
    """Tokens before them."""

    token_ids: Sequence[int]
    first: int = 0
    """The oldest number that is looked at."""


class ChainRows:
    """Rows of a pass over chains, at the same place in memory every time."""

    def __init__(self, *, max_requests: int, max_rows: int) -> None:
        self.max_requests, self.max_rows = max_requests, max_rows
        self._requests = [whole_numbers(max_requests) for _ in range(5)]
        self._rows = [whole_numbers(max_rows) for _ in range(2)]
        self._table_rows, starts, counts, contexts, firsts = map(address_of, self._requests)
        self.tokens_address, positions = map(address_of, self._rows)
        self.tokens_T: Tensor = torch.frombuffer(self._rows[0], dtype=torch.long)
        self.c = CRows(
            0,
            0,
            positions,
            starts,
            counts,
            contexts,
            # Nothing hangs below a chain.
            counts,
            firsts,
            None,
            0,
            0,
            0,
            0,
        )

    def write(self, chains: Sequence[TokenChain]) -> int:
        """Take in what the next call is about; returns the number of rows."""
        table_rows, starts, counts, contexts, firsts = self._requests
        tokens, positions = self._rows
        row = 0
        for place, (table_row, context, token_ids, first) in enumerate(chains):
            table_rows[place], contexts[place], firsts[place] = table_row, context, first
            starts[place], counts[place] = row, len(token_ids)
            for number, token_id in enumerate(token_ids, context):
                tokens[row], positions[row] = token_id, number
                row += 1
        self.c.num_rows, self.c.num_requests = row, len(chains)
        return row

    def moved_to(self, c: CRows) -> None:
        """From now on the kernels look at this copy of what they are told."""
        self.c = c

    def views(self, tables: BlockTables, windows: Iterable[int | None]) -> list[CView]:
        """Where the chains' requests are in tables that stay where they are."""
        return [
            CView(
                tables.by_window[window].data_ptr(),
                self._table_rows,
                tables.by_window[window].shape[1],
                tables.block_size,
                window or 0,
            )
            for window in windows
        ]


def whole_numbers(count: int) -> "array[int]":
    """Memory for so many: a few of them are written and read faster than numpy is asked to."""
    return array("q", [0]) * count


def address_of(numbers: "array[int] | array[float]") -> int:
    return numbers.buffer_info()[0]
