"""Passes that can be captured, against those that are launched as they come.

Catches: rounded-up rows, tokens or documents that change a loss, a figure or a gradient; a
micro-batch that is mixed with the one before it in the same memory; gradients of a step that are
not cleared or not added up. A CPU captures nothing and runs the same code.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.contracts.train_settings import LossSettings, TrainSettings
from fledge.engine.graphs import Graphs
from fledge.ops.micro_batch import MicroBatch
from fledge.ops.suffixes import lengthened_to, reaching
from fledge.testing import target_of, tiny_head, tiny_model
from fledge.training import stage
from fledge.training.assembly import assemble
from fledge.training.fixed_batches import FixedMemory, sized
from fledge.training.passes import CapturedPasses
from fledge.training.ttt import TTTModule, TTTResult
from tests.parity.ttt_batches import LENGTHS, random_batch, random_readout
from tests.unit.training.train_support import CPU, SHORT, losses, run, with_optimizer

STEPS = 3
NUM_TOKENS = 64


class Case:
    """A head, and micro-batches for it."""

    def __init__(self, **flags: Any) -> None:
        target = target_of(tiny_model().double())
        self.head = tiny_head(target, draft_vocab_size=40, **flags).double()
        self.readout = random_readout(self.head, torch.float64)
        self.module = TTTModule(
            self.head,
            target.embedding.weight,
            self.readout,
            LossSettings(steps=STEPS, chain_weights=True, start_share=0.5, step_decay=1.0),
            compute_dtype=torch.float64,
        )

    def batch(self, seed: int, lengths: tuple[int, ...] = LENGTHS, **more: Any) -> MicroBatch:
        return random_batch(
            self.head,
            self.readout,
            torch.float64,
            lengths=lengths,
            padded_to=NUM_TOKENS,
            seed=seed,
            **more,
        )

    def learned(self, pass_: Callable[[], TTTResult]) -> tuple[TTTResult, list[Tensor]]:
        for weight in self.head.parameters():
            weight.grad = torch.zeros_like(weight)
        result = pass_()
        return result, [one.grad.clone() for one in self.head.parameters() if one.grad is not None]

    def launched(self, batch: MicroBatch, counts_K: Tensor) -> tuple[TTTResult, list[Tensor]]:
        def pass_() -> TTTResult:
            result: TTTResult = self.module(batch, counts_K)
            torch.autograd.backward(result.loss)
            return result

        return self.learned(pass_)


def check_equal(
    ours: tuple[TTTResult, list[Tensor]], theirs: tuple[TTTResult, list[Tensor]]
) -> None:
    torch.testing.assert_close(ours[0].loss, theirs[0].loss.detach())
    torch.testing.assert_close(ours[0].sums.packed(), theirs[0].sums.packed())
    for one, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("variant", [{}, {"top_k": 6}], ids=["rows", "tops"])
@pytest.mark.parametrize("num_steps", [1, STEPS])
def test_sizes_change_no_loss_and_no_gradient(num_steps: int, variant: dict[str, int]) -> None:
    case = Case()
    passes = CapturedPasses(case.module, Graphs(CPU), longest=30)
    counts_K = torch.tensor([7.0, 6.0, 5.0])[:num_steps]
    sizes = set()
    for seed, lengths in enumerate((LENGTHS, (26, 11, 5, 3, 2, 1), (20, 30), LENGTHS)):
        batch = case.batch(seed, lengths, **variant)
        sizes.add(sized(batch, counts_K, longest=30).size)
        learn = partial(passes.learn, batch, counts_K, None, is_last=True)
        found = case.learned(learn)
        check_equal(found, case.launched(batch, counts_K))
    assert len(sizes) > 1


def test_micro_batches_of_one_size_share_their_memory() -> None:
    case, memory = Case(), FixedMemory()
    counts_K = torch.ones(STEPS)
    first, second = (sized(case.batch(0), counts_K * n, longest=30) for n in (1, 2))
    owned = memory.fill(first)
    expected = [one.clone() for one in second.tensors()]
    again = memory.fill(second)
    assert again is owned
    for one, other in zip(owned.tensors(), expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(counts_K, torch.ones(STEPS))
    other = memory.fill(sized(case.batch(3, (20, 30)), counts_K, longest=30))
    assert other.size != owned.size
    shared = [one.batch.features_TF.untyped_storage().data_ptr() for one in (owned, other)]
    assert shared[0] == shared[1]


def test_sizes_are_multiples_and_documents_are_bounded() -> None:
    case = Case()
    given = sized(case.batch(1), torch.ones(STEPS), longest=77)
    num_tokens = given.batch.documents.num_tokens
    assert num_tokens == NUM_TOKENS
    assert len(given.batch.targets.rows_R) % 2 == 0
    assert given.suffixes.num_tokens % 2 == 0
    assert len(given.batch.documents.lengths) == 64
    assert given.batch.documents.longest == given.suffixes.longest == 77


def test_suffixes_begin_earlier_where_more_is_asked_for() -> None:
    documents = Case().batch(0).documents
    suffixes = reaching(documents, (3, 1, 2, 3, 9, 4), STEPS)
    assert suffixes is not None
    longer = lengthened_to(suffixes, documents.num_tokens - 1)
    assert longer.num_tokens == documents.num_tokens - 1
    assert all(one >= own for one, own in zip(longer.lengths, suffixes.lengths, strict=True))
    with pytest.raises(AssertionError, match="no more tokens"):
        lengthened_to(suffixes, documents.num_tokens + 1)


def check_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: TrainSettings, **given: Any
) -> None:
    run(out=tmp_path / "launched", settings=settings, **given)
    monkeypatch.setattr(stage, "assemble", partial(assemble, is_captured=True))
    run(out=tmp_path / "captured", settings=settings, **given)
    for kind in ("train", "held_out"):
        ours, theirs = losses(tmp_path / "captured", kind), losses(tmp_path / "launched", kind)
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_whole_runs_learn_the_same(
    tmp_path: Path,
    tiny_target: Path,
    tiny_corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    settings = with_optimizer(SHORT, kind=kind, ema=0.9)
    check_both_ways(tmp_path, monkeypatch, settings, target=tiny_target, corpus=tiny_corpus)


def test_noise_is_drawn_by_passes_that_are_launched(
    tmp_path: Path, tiny_target: Path, tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SHORT, hidden_noise=0.05)
    check_both_ways(tmp_path, monkeypatch, settings, target=tiny_target, corpus=tiny_corpus)
