"""Fewer draft steps in the first part of training.

Catches: a first part of another length, depths that count as taught when they are not, a loss that
differs from that of a run with so few steps, and measurements that leave depths out.
"""

from pathlib import Path

import pytest

from fledge.contracts.train_settings import LossSettings
from fledge.training.train_plan import plan_training
from tests.unit.training.train_support import SHORT, curve, losses, opened, run, with_loss

EARLY = with_loss(SHORT, early_steps=1, early_share=0.5)


def test_the_first_part_takes_fewer_steps(
    tmp_path: Path, tiny_target: Path, tiny_features: Path
) -> None:
    run(tiny_target, tmp_path / "early", EARLY, features=tiny_features)
    run(tiny_target, tmp_path / "one", with_loss(SHORT, steps=1), features=tiny_features)
    taught = [
        [loss is not None for loss in figures["loss_at_depth"]]
        for _, figures in curve(tmp_path / "early")
    ]
    assert taught == [[True, False, False]] * 3 + [[True, True, True]] * 3
    assert losses(tmp_path / "early")[:3] == pytest.approx(losses(tmp_path / "one")[:3], rel=1e-5)
    for _, figures in curve(tmp_path / "early", "held_out"):
        assert None not in figures["loss_at_depth"]


def test_a_plan_counts_the_steps_that_are_taken(tiny_target: Path, tiny_features: Path) -> None:
    given = opened(tiny_target, features=tiny_features)
    whole, early = (
        plan_training(given, settings, itemsize=4, flops_per_s=1e9).seconds
        for settings in (SHORT, EARLY)
    )
    assert whole is not None
    assert early == pytest.approx(whole * 2 / 3)


def test_when_steps_are_taken() -> None:
    loss = LossSettings(steps=7, early_steps=3, early_share=0.25)
    assert [loss.steps_at(share) for share in (0.0, 0.2, 0.25, 0.9)] == [3, 3, 7, 7]
    assert LossSettings(steps=7).steps_at(0.0) == 7
