"""Training-time test on a CUDA device: flash attention, Triton kernels, compiled halves.

In float32 the fast path is held to the twin. In bfloat16 it may be no further from the float32
twin than the bfloat16 twin is, give or take a half: both round, each in its own places.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.contracts.train_settings import LossSettings
from fledge.ops.attention import AttentionSpec
from fledge.ops.documents import make_documents
from fledge.ops.draft_attention import StepKeys, attend_step, attend_step_plain
from fledge.testing import target_of, tiny_head, tiny_model
from fledge.training.ttt import TTTModule, TTTResult, count_labels
from tests.parity.test_ttt_kernels import (  # noqa: F401
    test_keys_are_merged,
    test_rows_are_compared,
)
from tests.parity.ttt_batches import random_batch, random_readout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
LENGTHS = (130, 1, 2, 3, 300, 64)


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


class Case:
    """A head on the device, and a micro-batch for it."""

    def __init__(self, *, top_k: int | None = None, **flags: Any) -> None:
        self.target = target_of(tiny_model(hidden_size=64).to(CUDA))
        sizes = {"head_dim": 64, "num_heads": 6, "num_kv_heads": 2}
        self.head = tiny_head(self.target, draft_vocab_size=80, **{**sizes, **flags}).to(CUDA)
        self.readout = random_readout(self.head, torch.float32)
        self.batch = random_batch(
            self.head,
            self.readout,
            torch.float32,
            lengths=LENGTHS,
            padded_to=sum(LENGTHS) + 12,
            top_k=top_k,
        )

    def run(
        self, dtype: torch.dtype, *, is_plain: bool, is_compiled: bool = False, **loss: Any
    ) -> tuple[TTTResult, dict[str, Tensor]]:
        module = TTTModule(
            self.head,
            self.target.embedding.weight,
            self.readout,
            LossSettings(**loss),
            compute_dtype=dtype,
            is_plain=is_plain,
            is_compiled=is_compiled,
        )
        self.head.zero_grad()
        mask_T = self.batch.loss_mask_T.cpu().numpy()
        counts_K = count_labels(mask_T, self.batch.documents.lengths, module.loss.steps)
        result = module(self.batch, torch.from_numpy(counts_K).to(CUDA))
        result.loss.backward()
        grads = {name: p.grad for name, p in self.head.named_parameters() if p.grad is not None}
        assert grads.keys() == dict(self.head.named_parameters()).keys()
        return result, grads


VARIANTS: list[dict[str, Any]] = [
    {},
    {"kind": "acceptance"},
    {"top_k": 6},
    {"sliding_window": 40, "fc_norm": True, "norm_output": True},
    {"sliding_window": 4, "norm_before_residual": True},
    {"head_dim": 128, "num_heads": 4, "num_kv_heads": 4},
]


def split(variant: dict[str, Any]) -> tuple[Case, dict[str, Any]]:
    options = dict(variant)
    loss = {"kind": options.pop("kind")} if "kind" in options else {}
    return Case(**options), loss


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_float32_fast_equals_twin(variant: dict[str, Any]) -> None:
    case, loss = split(variant)
    twin, twin_grads = case.run(torch.float32, is_plain=True, **loss)
    fast, fast_grads = case.run(torch.float32, is_plain=False, **loss)
    torch.testing.assert_close(fast.loss, twin.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(fast.sums.packed(), twin.sums.packed(), rtol=1e-4, atol=1e-4)
    for name, grad in twin_grads.items():
        scale = grad.abs().max().item()
        torch.testing.assert_close(fast_grads[name], grad, rtol=0, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_bfloat16_fast_is_as_near_as_the_twin(variant: dict[str, Any], is_compiled: bool) -> None:
    case, loss = split(variant)
    exact, exact_grads = case.run(torch.float32, is_plain=True, **loss)
    twin, twin_grads = case.run(torch.bfloat16, is_plain=True, **loss)
    fast, fast_grads = case.run(torch.bfloat16, is_plain=False, is_compiled=is_compiled, **loss)
    assert fast.loss.item() == pytest.approx(exact.loss.item(), rel=0.02)
    assert fast.loss.item() == pytest.approx(twin.loss.item(), rel=0.02)
    assert torch.equal(fast.sums.count_K, exact.sums.count_K)
    for name, grad in exact_grads.items():
        twin_error = ((twin_grads[name] - grad).norm() / grad.norm()).item()
        fast_error = ((fast_grads[name] - grad).norm() / grad.norm()).item()
        assert fast_grads[name].dtype == torch.float32
        assert fast_error < 1.5 * twin_error + 0.005, f"{name}: {fast_error} {twin_error}"


@pytest.mark.parametrize("window", [None, 5, 50])
@pytest.mark.parametrize("num_later", [0, 1, 6])
def test_attention_and_every_gradient(window: int | None, num_later: int) -> None:
    documents = make_documents(LENGTHS, CUDA)
    generator = torch.Generator(device=CUDA).manual_seed(0)

    def draw(num_heads: int) -> Tensor:
        shape = (documents.num_tokens, num_heads, 64)
        drawn = torch.randn(shape, generator=generator, device=CUDA, dtype=torch.bfloat16)
        return drawn.requires_grad_()

    query, grad_THD = draw(6), draw(6).detach()
    keys, values = [[draw(2) for _ in range(1 + num_later)] for _ in range(2)]
    spec = AttentionSpec(scale=0.125, window=window)
    inputs = [query, *keys, *values]
    outcomes = []
    for attend, dtype in ((attend_step, torch.bfloat16), (attend_step_plain, torch.float64)):
        wide = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        wide_keys, wide_values = wide[1 : 2 + num_later], wide[2 + num_later :]
        seen = StepKeys(wide_keys[0], wide_values[0], tuple(wide_keys[1:]), tuple(wide_values[1:]))
        out_THD = attend(wide[0], seen, documents, spec)
        grads = torch.autograd.grad(out_THD, wide, grad_THD.to(dtype), allow_unused=True)
        outcomes.append([out_THD, *grads])
    for found, expected in zip(*outcomes, strict=True):
        if found is None or expected is None:
            assert found is None or not found.any()
            assert expected is None or not expected.any()
            continue
        error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-3)
        assert error < 0.01


def test_memory_does_not_grow_with_the_square() -> None:
    """Four times the tokens in one document: at most a little more than four times the memory."""
    case = Case()
    peaks = []
    for num_tokens in (2048, 8192):
        case.batch = random_batch(case.head, case.readout, torch.bfloat16, lengths=(num_tokens,))
        case.run(torch.bfloat16, is_plain=False)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.run(torch.bfloat16, is_plain=False)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 4.5 * peaks[0]
