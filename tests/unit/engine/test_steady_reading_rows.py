"""What the head reads in cycles that run ahead lies as kernels read it.

Catches: rows that are a view with gaps, as of a batch of one place, of which kernels read the gaps:
texts stay right, and drafts are of other tokens.
"""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from fledge.engine.draft_passes import steady_reading
from fledge.engine.steady_batch import SteadyBatch
from fledge.ops.paged import BlockTables

DEVICE = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("gap", [0, 1])
def test_rows_have_no_gaps(size: int, gap: int) -> None:
    batch = SteadyBatch(size, num_levels=4, spare_row=0, device=DEVICE)
    state_XB = torch.randint(2, 9, (batch.state_XB.shape[0], size + gap))
    batch.state_XB = state_XB[:, :size]
    tables = BlockTables(16, {None: torch.arange(size * 8).view(size, 8)})
    packed, before_T = steady_reading(batch, tables, None)
    assert packed.token_ids_T.tolist() == batch.fresh_tokens_BL.reshape(-1).tolist()
    rows = [getattr(packed, field.name) for field in fields(packed)]
    tensors = [row for row in [*rows, before_T] if isinstance(row, Tensor)]
    assert len(tensors) > 5
    assert all(tensor.is_contiguous() for tensor in tensors)
