"""The best of a softmax by kernels, in Triton's interpreter, against log_softmax and topk.

Catches: a part of the vocabulary left out or counted twice, columns behind the last, an order that
is not falling, a sum over a part only, rows whose logits are no numbers.
"""

import pytest
import torch

from fledge.ops.kernel_choice import choose_kernels
from fledge.ops.top_logprobs import TopLogprobs, top_logprobs

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")


def fused(logits_TV: torch.Tensor, num_best: int) -> TopLogprobs:
    with choose_kernels("triton"):
        return top_logprobs(logits_TV, num_best)


@pytest.mark.parametrize(
    ("rows", "vocab_size", "num_best"),
    [(1, 1, 1), (3, 50, 7), (2, 4096, 8), (2, 9001, 5), (2, 4100, 32)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_best_of_each_row(
    rows: int, vocab_size: int, num_best: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    # No two logits of a row are equal, also in half precision.
    order = torch.rand(rows, vocab_size, generator=generator).argsort(dim=1)
    logits_TV = (torch.linspace(-900, 30, vocab_size)[order]).to(dtype)
    if dtype == torch.float16:
        logits_TV = torch.linspace(-4, 4, vocab_size)[order].to(dtype)
    got, wanted = fused(logits_TV, num_best), top_logprobs(logits_TV, num_best)
    torch.testing.assert_close(got.logprobs_TK, wanted.logprobs_TK, rtol=1e-5, atol=1e-5)
    chosen = logits_TV.gather(1, got.indices_TK)
    assert torch.equal(chosen, logits_TV.gather(1, wanted.indices_TK))
    assert all(len(set(row)) == num_best for row in got.indices_TK.tolist())


def test_equal_logits_and_logits_that_rule_out() -> None:
    logits_TV = torch.full((2, 40), float("-inf"))
    logits_TV[:, 7] = logits_TV[:, 30] = 2.0
    logits_TV[1] = 1.0
    got = fused(logits_TV, 4)
    assert got.indices_TK[0, :2].tolist() == [7, 30], "the first of equals"
    torch.testing.assert_close(got.logprobs_TK[0, :2].exp(), torch.tensor([0.5, 0.5]))
    assert got.logprobs_TK[0, 2:].lt(-1e38).all()
    assert got.indices_TK[1].tolist() == [0, 1, 2, 3]
    assert got.indices_TK.max() < 40


def test_rows_whose_logits_are_no_numbers_say_so() -> None:
    logits_TV = torch.zeros(2, 20)
    logits_TV[0, 3] = float("nan")
    got = fused(logits_TV, 3)
    assert got.logprobs_TK[0].isnan().all()
    assert got.indices_TK.max() < 20
    torch.testing.assert_close(got.logprobs_TK[1].exp(), torch.full((3,), 0.05))
