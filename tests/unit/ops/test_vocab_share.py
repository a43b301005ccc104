"""A part of the vocabulary: the plain way against exact sums, the kernel against the plain way.

Catches: ties that go to a later token, padding of the last block taken for tokens, a part whose
best token is far below the best of all, and shares above one.
"""

import pytest
import torch

from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.vocab_share import weigh_part, weigh_part_plain


def rows(vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    logits_PV = (6 * torch.randn(7, vocab_size, generator=generator)).to(dtype)
    is_part_V = torch.rand(vocab_size, generator=generator) < 0.3
    is_part_V[[0, -1]] = torch.tensor([False, True])
    logits_PV[1, is_part_V] -= 200  # beyond what float32 can hold as a share
    logits_PV[2, ~is_part_V] -= 60  # all but everything
    logits_PV[3] = 1.0  # all alike
    logits_PV[4, [vocab_size // 2, vocab_size - 1]] = 100.0  # two are best
    return logits_PV, is_part_V


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [5, 64, 4096, 9000])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_the_plain_way_is_exact(vocab_size: int, dtype: torch.dtype, temperature: float) -> None:
    logits_PV, is_part_V = rows(vocab_size, dtype)
    share = weigh_part_plain(logits_PV, is_part_V, temperature=temperature)
    exact_PV = logits_PV.double() / temperature
    log_part_P = exact_PV[:, is_part_V].logsumexp(-1)
    assert share.greedy_P.tolist() == exact_PV.argmax(-1).tolist()
    torch.testing.assert_close(share.log_part_P.double(), log_part_P, rtol=1e-5, atol=1e-5)
    log_share_P = log_part_P - exact_PV.logsumexp(-1)
    torch.testing.assert_close(share.log_share_P.double(), log_share_P, rtol=1e-5, atol=2e-5)
    assert share.log_share_P.max() <= 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel runs on the GPU instead")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "temperature"), [(5, 1.0), (64, 0.5), (4096, 1.0), (9000, 0.7), (9000, 3.0)]
)
def test_the_kernel_equals_its_twin(
    vocab_size: int, dtype: torch.dtype, temperature: float
) -> None:
    pytest.importorskip("triton")
    logits_PV, is_part_V = rows(vocab_size, dtype)
    with choose_kernels("triton"):
        fused = weigh_part(logits_PV, is_part_V, temperature=temperature)
    plain = weigh_part(logits_PV, is_part_V, temperature=temperature)
    assert fused.greedy_P.tolist() == plain.greedy_P.tolist()
    torch.testing.assert_close(fused.log_part_P, plain.log_part_P, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.log_share_P, plain.log_share_P, rtol=1e-5, atol=2e-5)
    assert fused.log_share_P.max() <= 0


def test_no_rows_are_no_trouble() -> None:
    share = weigh_part(torch.empty(0, 10), torch.ones(10, dtype=torch.bool))
    assert share.greedy_P.shape == share.log_share_P.shape == (0,)
