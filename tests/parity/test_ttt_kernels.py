"""Triton kernels of training against their twins: on CUDA, or in the interpreter (conftest)."""

import pytest
import torch

from fledge.contracts.train_settings import LossKind
from fledge.ops.document_flash import Attended
from fledge.ops.key_merge import merge_backward_plain, merge_plain
from fledge.ops.soft_target_chunks import Chunk, compare_rows_plain

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("kind", ["soft_cross_entropy", "acceptance", "blend"])
@pytest.mark.parametrize("vocab_size", [64, 100, 5000])
@pytest.mark.parametrize("has_slope", [True, False])
def test_rows_are_compared(kind: LossKind, vocab_size: int, has_slope: bool) -> None:
    from fledge.ops.soft_targets_triton import compare_rows_fused

    generator = torch.Generator().manual_seed(vocab_size)
    num_rows, num_steps = 4, 3
    target_CV = 3 * torch.randn((num_rows, vocab_size), generator=generator)
    # Only a few tokens of a distribution are kept: the first and the last block may have none.
    target_CV[2] = -torch.inf
    target_CV[2, vocab_size // 2 : vocab_size // 2 + 3] = torch.tensor([1.0, 0.0, -2.0])
    draft_PV = 3 * torch.randn((num_rows * num_steps, vocab_size), generator=generator)
    # The best token twice: the first one counts.
    draft_PV[4, [7, 50]] = 30.0
    chunk = Chunk(
        greedy_C=torch.tensor([int(draft_PV[1].argmax()), 7, 3, -1], device=DEVICE),
        mass_C=torch.rand(num_rows, generator=generator).to(DEVICE),
        weights_CK=torch.rand((num_rows, num_steps), generator=generator).to(DEVICE),
    )
    inputs = (target_CV.to(DEVICE), draft_PV.to(DEVICE), chunk, kind)
    dtype = torch.float32 if has_slope else None
    expected, found = compare_rows_plain(*inputs, dtype), compare_rows_fused(*inputs, dtype)
    assert expected.correct_CK.tolist() == found.correct_CK.tolist()
    assert expected.correct_CK[0, 1]
    assert expected.correct_CK[1, 1]
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("num_heads", "num_groups", "head_size", "num_keys"),
    [(6, 2, 8, 3), (4, 4, 16, 1), (3, 1, 12, 6)],
)
def test_keys_are_merged(num_heads: int, num_groups: int, head_size: int, num_keys: int) -> None:
    from fledge.ops.draft_attention_triton import merge_backward_fused, merge_fused

    num_tokens, scale = 5, 0.3
    generator = torch.Generator(device=DEVICE).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    query, first, grad, query_grad = draw(4, num_tokens, num_heads, head_size)
    lse_HT = 3 * draw(num_heads, num_tokens)
    # A window may leave nothing but the merged keys to be seen.
    lse_HT[:, 0], first[0] = -torch.inf, 0.0
    keys, values = draw(2, num_keys, num_tokens, num_groups, head_size)
    attended = Attended(first, lse_HT)
    merged = merge_plain(query, attended, keys, values, scale)
    torch.testing.assert_close(merge_fused(query, attended, keys, values, scale), merged)
    inputs = (grad, query, merged, keys, values, scale)
    torch.testing.assert_close(
        merge_backward_fused(*inputs, query_grad_THD=query_grad.clone()),
        merge_backward_plain(*inputs, query_grad_THD=query_grad.clone()),
    )
