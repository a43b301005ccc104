"""The feature codec on CUDA: the bytes of the CPU, and the same rows back."""

import numpy as np
import pytest
import torch

from fledge.contracts.capture_settings import FeatureFormat
from fledge.ops.feature_codec import make_codec
from fledge.store.channels import Channels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_TAPS = 3


@pytest.mark.parametrize("name", ["exact", "q8", "q6", "q5", "q4"])
@pytest.mark.parametrize("hidden_size", [100, 576, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_those_of_the_cpu(
    name: FeatureFormat, hidden_size: int, dtype: torch.dtype
) -> None:
    width = NUM_TAPS * hidden_size
    spread = np.geomspace(0.01, 1000, width, dtype=np.float32)
    codec = make_codec(
        name,
        hidden_size=hidden_size,
        num_taps=NUM_TAPS,
        dtype=dtype,
        channels=Channels(spread / 2, spread),
    )
    chance = torch.Generator().manual_seed(0)
    rows = (torch.randn(700, width, generator=chance) * torch.from_numpy(spread)).to(dtype)
    rows[3] = 0
    rows[5] *= 1e4
    on_cpu, on_cuda = codec.encode(rows), codec.encode(rows.cuda())
    for part, array in on_cpu.items():
        assert torch.equal(on_cuda[part].cpu(), array), part
    part_of_it = codec.encode(rows[100:103].cuda())
    for part, array in part_of_it.items():
        assert torch.equal(array, on_cuda[part][100:103]), part
    for result in (torch.float32, torch.bfloat16):
        found = codec.decode(on_cuda, result).cpu().float()
        expected = codec.decode(on_cpu, result).float()
        error = (found - expected).norm() / expected.norm()
        assert float(error) < (1e-6 if result is torch.float32 else 4e-3)


def test_bad_rows_are_told_without_waiting() -> None:
    codec = make_codec("q5", hidden_size=64, num_taps=1, dtype=torch.bfloat16)
    rows = torch.randn(8, 64, device="cuda")
    rows[2, 3] = torch.inf
    rows[6, 0] = torch.nan
    is_finite = codec.is_finite_T(codec.encode(rows))
    assert is_finite.is_cuda
    assert is_finite.tolist() == [True, True, False, True, True, True, False, True]
