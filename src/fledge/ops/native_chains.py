"""Chains of tokens of a few requests, laid out once for the native kernels and written in place.

Every cycle of decoding on a CPU has the same few numbers to hand over; making tensors of them each
time would take longer than reading a draft.

Legend: B requests, T rows.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fledge.ops.native_structs import CRows, CView
from fledge.ops.paged import BlockTables

Array = np.ndarray[Any, Any]


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
        by_request = np.zeros((5, max_requests), dtype=np.int64)
        self._table_rows, self._starts, self._counts, self._context, self._first = by_request
        by_row = np.zeros((2, max_rows), dtype=np.int64)
        self._tokens, self._positions = by_row
        self._memory = by_request, by_row
        self.tokens_T: Tensor = torch.from_numpy(self._tokens)
        self.c = CRows(
            0,
            0,
            _address(self._positions),
            _address(self._starts),
            _address(self._counts),
            _address(self._context),
            # Nothing hangs below a chain.
            _address(self._counts),
            _address(self._first),
            None,
            0,
            0,
            0,
            0,
        )

    def write(self, chains: Sequence[TokenChain]) -> int:
        """Take in what the next call is about; returns the number of rows."""
        starts, counts = [0], []
        positions: list[int] = []
        for one in chains:
            count = len(one.token_ids)
            counts.append(count)
            starts.append(starts[-1] + count)
            positions += range(one.context, one.context + count)
        num_rows = starts.pop()
        num = len(chains)
        self._table_rows[:num] = [one.table_row for one in chains]
        self._context[:num] = [one.context for one in chains]
        self._first[:num] = [one.first for one in chains]
        self._starts[:num], self._counts[:num] = starts, counts
        self._positions[:num_rows] = positions
        self._tokens[:num_rows] = list(chain.from_iterable(one.token_ids for one in chains))
        self.c.num_rows, self.c.num_requests = num_rows, num
        return num_rows

    @property
    def tokens_address(self) -> int:
        return _address(self._tokens)

    def views(self, tables: BlockTables, windows: Iterable[int | None]) -> list[CView]:
        """Where the chains' requests are in tables that stay where they are."""
        return [
            CView(
                tables.by_window[window].data_ptr(),
                _address(self._table_rows),
                tables.by_window[window].shape[1],
                tables.block_size,
                window or 0,
            )
            for window in windows
        ]


def _address(array: Array) -> int:
    return int(array.ctypes.data)
