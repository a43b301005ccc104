"""What a head is given to read of cycles that run ahead."""

import pytest
import torch

from fledge.engine.draft_passes import steady_reading
from fledge.engine.steady_batch import SteadyBatch
from fledge.ops.paged import BlockTables


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_tokens_lie_in_a_row_for_kernels(size: int) -> None:
    """State is padded to even sizes; kernels know nothing of the gaps."""
    batch = SteadyBatch(size, 3, spare_row=0, device=torch.device("cpu"))
    said_BL = torch.arange(3 * size).view(size, 3) + 10
    batch.lens_B.fill_(4)
    batch.advance(torch.full((size,), 3), said_BL)
    tables = BlockTables(4, {None: torch.arange(4 * size).view(size, 4)})
    packed, before_T = steady_reading(batch, tables, None)
    assert packed.token_ids_T.tolist() == said_BL.flatten().tolist()
    for rows in (packed.token_ids_T, packed.positions_T, packed.write_slots_T, before_T):
        assert rows is not None
        assert rows.is_contiguous()
    for line in (batch.lens_B, batch.fresh_B, batch.rows_B, batch.said_B):
        assert line.is_contiguous()
