"""The block tables on the device: a row for each running request, and one for nobody.

A write to a device costs the host as much as some work of a cycle, however little is written.
Blocks that many requests are given at once are therefore written together. Tables on a CPU are
written at once, without torch's operations, which take longer there than what they do.
"""

from collections.abc import Mapping

import torch

from fledge.engine.blocks import NOT_THERE
from fledge.engine.sequence import Sequence
from fledge.ops.paged import BlockTables
from fledge.ops.staging import send


def without_drafts(tables: BlockTables, context_len: int) -> BlockTables:
    """Tables for passes in which nobody has drafts, and nobody needs room behind the context.

    They are as wide as those of an engine without a head, and so are the kernels that read them.
    """
    width = -(-context_len // tables.block_size)
    return BlockTables(
        tables.block_size, {window: table[:, :width] for window, table in tables.by_window.items()}
    )


class BlockRows:
    """Tables by kind of attention, and what is about to be written to them."""

    def __init__(
        self, windows: Mapping[int | None, int], num_rows: int, width: int, device: torch.device
    ) -> None:
        self.device = device
        self.tables = {
            window: torch.full((num_rows, width), NOT_THERE, device=device) for window in windows
        }
        is_on_host = device.type == "cpu"
        self._on_host = {
            window: table.numpy() for window, table in self.tables.items() if is_on_host
        }
        self._rows: list[int] = []
        self._places: list[int] = []
        self._blocks: dict[int | None, list[int]] = {window: [] for window in windows}

    def reset(self, spare: Mapping[int | None, int]) -> None:
        """Nobody holds anything; the last row shows one spare block of each kind."""
        self._forget_pending()
        for window, table in self.tables.items():
            table.fill_(NOT_THERE)
            table[-1] = spare[window]

    @property
    def shape(self) -> torch.Size:
        """Of each table: rows, and blocks that a row has places for."""
        return next(iter(self.tables.values())).shape

    def show(self, seq: Sequence, first: int) -> None:
        """Have a request's row say what it holds from a place on, once `flush` is called."""
        if self._on_host:
            for window, table in self._on_host.items():
                blocks = seq.blocks[window]
                table[seq.row, first : len(blocks)] = blocks[first:]
            return
        count = 0
        for window, blocks in seq.blocks.items():
            shown = blocks[first:]
            self._blocks[window] += shown
            count = len(shown)
        self._rows += [seq.row] * count
        self._places += range(first, first + count)

    def flush(self) -> None:
        """Write what was to be shown, behind what the device was asked for before."""
        if not self._rows:
            return
        rows_N, places_N, *blocks = send(
            [self._rows, self._places, *self._blocks.values()], self.device
        )
        for table, blocks_N in zip(self.tables.values(), blocks, strict=True):
            table.index_put_((rows_N, places_N), blocks_N)
        self._forget_pending()

    def _forget_pending(self) -> None:
        self._rows, self._places = [], []
        self._blocks = {window: [] for window in self._blocks}

    def hide(self, window: int | None, seq: Sequence, places: slice | int = slice(None)) -> None:
        """Places of a request's row show nothing."""
        self.tables[window][seq.row, places] = NOT_THERE
