"""What the head reads in cycles that run ahead lies as kernels read it.

Catches: rows that are a view with gaps, as of a batch of one place, of which kernels read the gaps:
texts stay right, and drafts are of other tokens. And prompts that are launched piece by piece for
ever because a pass once waited for the host.
"""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from fledge import Engine, EngineSettings
from fledge.engine.device_clock import DeviceClock
from fledge.engine.draft_passes import steady_reading
from fledge.engine.draft_plan import PLAIN, Load
from fledge.engine.steady_batch import SteadyBatch
from fledge.engine.steady_flight import Collected, Started
from fledge.ops.paged import BlockTables
from tests.lossless.support import pair

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


@pytest.mark.parametrize(("asking_s", "expected_s"), [(0.03, 0.0), (0.001, 0.04 / 512)])
def test_what_the_host_takes_is_not_what_rows_cost(asking_s: float, expected_s: float) -> None:
    """A pass that was launched piece by piece, or compiled on the way, says nothing of its rows."""
    _, target = pair("llama")
    reader = Engine(target, settings=EngineSettings(graphs="on"))._cycle.ahead.steady._reader
    started = Started(
        plan=PLAIN,
        load=Load(num_requests=0, num_other_tokens=512),
        members=[],
        facts_XB=torch.zeros(0),
        gains=None,
        clock=DeviceClock(DEVICE),
        is_cold=False,
        asking_s=asking_s,
        is_reading=True,
    )
    reader.observe(Collected(started, {}, draft_s=0.0, target_s=0.04))
    assert reader._row_s == pytest.approx(expected_s)
