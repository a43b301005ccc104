"""The oracle in 16 bits is the family's own formula, and nothing of it stays behind.

Catches an oracle that leaves out what fused attention leaves out, one that rounds scores, and a
function of transformers that stays replaced.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2

from fledge.models.wide_attention import wide_eager_attention
from fledge.testing import ARCHITECTURES, tiny_model

IDS_1T = torch.arange(3, 15)[None] * 7 % 97


def eager_model(architecture: str, dtype: torch.dtype, **options: Any) -> Any:
    model = tiny_model(architecture, dtype=dtype, **options)
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(IDS_1T, use_cache=False).logits[0]
    return found


@torch.no_grad()
def wide_logits(model: Any) -> Tensor:
    with wide_eager_attention(model):
        return logits(model)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_where_nothing_is_rounded_nothing_changes(architecture: str) -> None:
    model = eager_model(architecture, torch.float32)
    assert torch.equal(wide_logits(model), logits(model))


def test_soft_caps_count() -> None:
    capped, free = (
        eager_model("gemma2-hybrid", torch.bfloat16, attn_logit_softcapping=cap)
        for cap in (0.5, 1e4)
    )
    wide, eager = wide_logits(capped).double(), logits(capped).double()
    assert (wide - eager).norm() < 0.05 * eager.norm()
    assert (wide - wide_logits(free).double()).norm() > 0.15 * eager.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_float32_and_outputs_are_not(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = modeling_gemma2.eager_attention_forward, []

    def watched(module: Any, *tensors: Tensor, **options: Any) -> Any:
        seen.extend(tensor.dtype for tensor in tensors[:3])
        return own(module, *tensors, **options)

    monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", watched)
    assert wide_logits(eager_model("gemma2-hybrid", dtype)).dtype == dtype
    assert set(seen) == {torch.float32}


def test_the_function_comes_back_after_an_error() -> None:
    own = modeling_gemma2.eager_attention_forward
    model = eager_model("gemma2-hybrid", torch.bfloat16)
    with wide_eager_attention(model):
        assert modeling_gemma2.eager_attention_forward is not own
    assert modeling_gemma2.eager_attention_forward is own
    with pytest.raises(IndexError), wide_eager_attention(model):
        model(IDS_1T + 10_000)
    assert modeling_gemma2.eager_attention_forward is own
