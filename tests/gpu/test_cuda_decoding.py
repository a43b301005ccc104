"""Decoding held-out prompts beside a training on a CUDA device: weights copied, little memory."""

import pytest
import torch

from fledge.testing import target_of, tiny_head, tiny_model
from fledge.training.decoding import HeldOutDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
PROMPTS = [(3 + number, 9, 11, 40) for number in range(20)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_weights_give_the_same_counts_again(dtype: torch.dtype) -> None:
    target = target_of(tiny_model("llama", dtype=dtype).to(CUDA))
    heads = [tiny_head(target, seed=seed).to(CUDA) for seed in (0, 1)]
    before = torch.cuda.memory_allocated()
    decoder = HeldOutDecoder(
        target,
        heads[0].config,
        heads[0].draft_to_target_V,
        PROMPTS,
        depth=4,
        max_tokens=24,
    )
    counts = [decoder.measure(heads[which].state_dict()) for which in (0, 1, 0)]
    assert counts[0] == counts[2]
    assert counts[0].num_cycles > 0
    # The products' own scratch on the two streams of a capture is 64 MiB of it.
    assert torch.cuda.memory_allocated() - before < 96 * 2**20
