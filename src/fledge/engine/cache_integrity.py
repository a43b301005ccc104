"""Proof that a cache's blocks, tables and rows are all accounted for."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many

from torch import Tensor

from fledge.engine.blocks import NOT_THERE, BlockPool
from fledge.engine.sequence import Sequence


def check_blocks(
    running: Many[Sequence],
    pools: Mapping[int | None, BlockPool],
    tables: Mapping[int | None, Tensor],
    free_rows: Many[int],
) -> None:
    """No block is lost, none is shared wrongly, and the tables say what the requests hold."""
    for window, pool in pools.items():
        readers: Counter[int] = Counter()
        for seq in running:
            held = [block for block in seq.blocks[window] if block != NOT_THERE]
            assert len(held) == len(set(held)), "a request holds a block twice"
            readers.update(held)
            shown: list[int] = tables[window][seq.row].tolist()
            rest = len(shown) - len(seq.blocks[window])
            assert shown == seq.blocks[window] + [NOT_THERE] * rest, (
                "a table shows other blocks than are held"
            )
        pool.check_integrity(readers)
    rows = [*(seq.row for seq in running), *free_rows]
    assert sorted(rows) == list(range(len(rows))), "a row of the tables is lost"
