"""Bit masks over rows of logits."""

import pytest
import torch

from fledge.ops.grammar_mask import mask_rows


@pytest.mark.parametrize("vocab_size", [1, 8, 31, 97])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_set_bits_stay_possible(vocab_size: int, dtype: torch.dtype) -> None:
    """Masks are whole words, so they are mostly longer than the vocabulary."""
    generator = torch.Generator().manual_seed(vocab_size)
    num_bytes = -(-vocab_size // 32) * 4
    logits_RV = torch.randn(5, vocab_size, generator=generator).to(dtype)
    masks_MY = torch.randint(0, 256, (3, num_bytes), generator=generator, dtype=torch.uint8)
    rows_M = torch.tensor([4, 0, 2])
    masked_RV = logits_RV.clone()
    mask_rows(masked_RV, rows_M, masks_MY)
    for row in range(5):
        for token in range(vocab_size):
            is_allowed = True
            if row in rows_M:
                bits = masks_MY[rows_M.tolist().index(row)]
                is_allowed = bool(int(bits[token // 8]) >> (token % 8) & 1)
            expected = logits_RV[row, token] if is_allowed else torch.tensor(float("-inf"))
            assert masked_RV[row, token] == expected
