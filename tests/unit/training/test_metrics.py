"""Figures from sums: definitions, additivity, nothing counted."""

import pytest
import torch

from fledge.training.metrics import ideal_speed_up, measure_sums, weighted_loss
from fledge.training.step_sums import StepSums, add_sums, no_sums, unpacked


def make_sums(**rows: list[float]) -> StepSums:
    width = len(next(iter(rows.values())))
    values = {name: torch.zeros(width) for name in StepSums._fields}
    values |= {name: torch.tensor(row) for name, row in rows.items()}
    return StepSums(**values)


def test_figures_follow_their_definitions() -> None:
    sums = make_sums(
        loss_K=[20.0, 30.0],
        count_K=[10.0, 8.0],
        correct_K=[5.0, 2.0],
        chain_K=[5.0, 1.0],
        offered_K=[10.0, 4.0],
        accepted_K=[6.0, 4.0],
        entropy_K=[10.0, 8.0],
    )
    figures = measure_sums(sums, step_decay=0.5)
    assert figures.loss == pytest.approx(2.0 + 0.5 * 3.75)
    assert figures.loss_at_depth == (2.0, 3.75)
    assert figures.entropy_at_depth == (1.0, 1.0)
    assert figures.accuracy_at_depth == (0.5, 0.25)
    assert figures.acceptance_at_depth == (0.5, 0.25)
    assert figures.expected_acceptance_at_depth == pytest.approx((0.6, 0.5))
    assert figures.ideal_speed_up == pytest.approx(1 + 0.5 + 0.5 * 0.25)
    assert figures.num_labels == 10
    assert figures.as_record()["accuracy_at_depth"] == [0.5, 0.25]


def test_sums_add_up_however_the_work_was_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [
        unpacked(torch.rand(len(StepSums._fields), 3, generator=generator).round(decimals=3))
        for _ in range(6)
    ]
    together = add_sums(parts)
    in_two = add_sums([add_sums(parts[:2]), add_sums(parts[2:])])
    for one, other in zip(together, in_two, strict=True):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, other, rtol=1e-15, atol=0)
    again = unpacked(together.packed())
    assert all(torch.equal(one, other) for one, other in zip(again, together, strict=True))


def test_what_was_never_counted_is_none() -> None:
    figures = measure_sums(no_sums(3), step_decay=0.8)
    assert figures.loss is None
    assert figures.ideal_speed_up is None
    assert figures.accuracy_at_depth == (None, None, None)


def test_a_depth_never_offered_ends_the_chain() -> None:
    assert ideal_speed_up([0.5, None, 0.9]) == pytest.approx(1.5)
    assert ideal_speed_up([0.0, None]) == pytest.approx(1.0)
    assert ideal_speed_up([]) is None
    assert weighted_loss([1.0, None, 1.0], 0.5) == pytest.approx(1.25)
