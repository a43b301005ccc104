"""Held-out measurement: no gradients, no noise, training goes on as before."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from fledge.ops.documents import make_documents
from fledge.ops.micro_batch import MicroBatch, TargetRows
from fledge.training.held_out import measure_held_out
from fledge.training.step_sums import StepSums
from fledge.training.ttt import TTTResult

CPU = torch.device("cpu")


class Counting(nn.Module):
    """Counts a micro-batch's tokens in every sum, and looks at how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: MicroBatch, denominators_K: Tensor) -> TTTResult:
        assert not self.training
        assert not torch.is_grad_enabled()
        if batch.sample_numbers == (13,):
            raise RuntimeError("a bad sample")
        row_K = torch.full_like(denominators_K, len(batch.token_ids_T)) * self.weight
        return TTTResult(row_K.sum(), StepSums(*[row_K] * len(StepSums._fields)))


def batch_of(length: int, number: int = 0) -> MicroBatch:
    empty = torch.empty(0, dtype=torch.long)
    return MicroBatch(
        token_ids_T=torch.zeros(length, dtype=torch.long),
        loss_mask_T=torch.zeros(length, dtype=torch.bool),
        documents=make_documents([length], CPU),
        features_TF=torch.zeros(length, 4),
        targets=TargetRows(rows_R=empty, greedy_R=empty, log_mass_R=torch.empty(0)),
        sample_numbers=(number,),
    )


@pytest.mark.parametrize("is_training", [True, False])
def test_sums_of_all_micro_batches(is_training: bool) -> None:
    module = Counting().train(is_training)
    batches: Iterator[MicroBatch] = (batch_of(length) for length in (3, 5, 7))
    sums = measure_held_out(module, batches, num_steps=2)
    assert sums.count_K.tolist() == [15.0, 15.0]
    assert not sums.loss_K.requires_grad
    assert module.training is is_training


def test_nothing_held_out_counts_nothing() -> None:
    assert measure_held_out(Counting(), [], num_steps=3).count_K.tolist() == [0.0, 0.0, 0.0]


def test_training_mode_comes_back_after_an_error() -> None:
    module = Counting().train()
    with pytest.raises(RuntimeError, match="a bad sample"):
        measure_held_out(module, [batch_of(3, number=13)], num_steps=1)
    assert module.training
