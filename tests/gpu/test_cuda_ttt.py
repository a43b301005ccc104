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
from fledge.models.turned_rows import TurnedRows, target_rows
from fledge.ops.attention import AttentionSpec
from fledge.ops.documents import make_documents
from fledge.ops.draft_attention import StepKeys, attend_step, attend_step_plain
from fledge.ops.suffixes import Suffixes
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
        if isinstance(self.head.lm_head, TurnedRows):
            rows_VD = target_rows(self.readout, self.head.draft_to_target_V)
            self.head.lm_head.rows_VD = rows_VD.to(CUDA)
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
    {"turned_rows": True},
    {"kind": "blend", "chain_weights": True, "start_share": 0.75},
]


def split(variant: dict[str, Any]) -> tuple[Case, dict[str, Any]]:
    options = dict(variant)
    names = [name for name in LossSettings.__dataclass_fields__ if name in options]
    loss = {name: options.pop(name) for name in names}
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


@pytest.mark.parametrize("lengths", [LENGTHS, (50, 1, 1, 2, 300, 17)], ids=["whole", "ends"])
@pytest.mark.parametrize("window", [None, 5, 50])
@pytest.mark.parametrize("num_later", [0, 1, 6])
def test_attention_and_every_gradient(
    lengths: tuple[int, ...], window: int | None, num_later: int
) -> None:
    documents = make_documents(LENGTHS, CUDA)
    suffixes = Suffixes(documents, lengths)
    rows_A = suffixes.rows_A
    generator = torch.Generator(device=CUDA).manual_seed(0)

    def draw(num_heads: int) -> Tensor:
        shape = (documents.num_tokens, num_heads, 64)
        return torch.randn(shape, generator=generator, device=CUDA, dtype=torch.bfloat16)

    inputs = [draw(6), *(draw(2) for _ in range(2 * (1 + num_later)))]
    grad_AHD = draw(6)[rows_A]
    spec = AttentionSpec(scale=0.125, window=window)
    outcomes = []
    for is_plain, dtype in ((False, torch.bfloat16), (True, torch.float64)):
        wide = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        own, keys, values = wide[0], wide[1 : 2 + num_later], wide[2 + num_later :]
        if is_plain:
            seen = StepKeys(keys[0], values[0], tuple(keys[1:]), tuple(values[1:]))
            out_AHD = attend_step_plain(own, seen, documents, spec)[rows_A]
        else:
            later = [tuple(one[rows_A] for one in some[1:]) for some in (keys, values)]
            seen = StepKeys(keys[0], values[0], *later)
            out_AHD = attend_step(own[rows_A], seen, suffixes, spec)
        grads = torch.autograd.grad(out_AHD, wide, grad_AHD.to(dtype), allow_unused=True)
        outcomes.append([out_AHD, *grads])
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
