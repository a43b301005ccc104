"""What is left of long runs by Muon."""

from dataclasses import replace
from pathlib import Path

import pytest

from fledge.contracts.train_settings import OptimizerSettings
from fledge.training.optimizer import learning_rate
from fledge.training.step_memory import short_memory, steps_remembered
from tests.unit.training.train_support import SHORT, Notes, run

FORGETFUL = OptimizerSettings(kind="muon", muon_rate=0.05, muon_decay=0.3)


@pytest.mark.parametrize(
    ("rate", "decay", "num_steps"), [(0.05, 0.3, 19_000), (0.006, 0.2, 22_000)]
)
def test_what_is_no_longer_counted_is_down_to_an_eth(
    rate: float, decay: float, num_steps: int
) -> None:
    settings = OptimizerSettings(kind="muon", muon_rate=rate, muon_decay=decay)
    left = 1.0
    for step in range(num_steps - steps_remembered(settings, num_steps), num_steps):
        share = learning_rate(settings, step, num_steps) / settings.learning_rate
        left *= 1 - rate * decay * share
    assert left == pytest.approx(0.368, abs=0.01)


@pytest.mark.parametrize(
    "settings",
    [
        OptimizerSettings(kind="muon", muon_rate=0.05),
        OptimizerSettings(kind="adamw", muon_rate=0.05, muon_decay=0.3),
        OptimizerSettings(kind="muon", muon_rate=0.006, muon_decay=0.2),
    ],
    ids=["no decay", "adamw", "a low rate"],
)
def test_runs_that_remember_are_told_nothing(settings: OptimizerSettings) -> None:
    assert short_memory(settings, 22_000) is None


def test_a_short_run_may_have_a_high_rate() -> None:
    assert short_memory(FORGETFUL, 100) is None
    told = short_memory(FORGETFUL, 19_000)
    assert told is not None
    assert "of 19,000 steps mostly the last 3,0" in told


def test_a_run_that_forgets_says_so_when_it_begins(
    tmp_path: Path, tiny_target: Path, tiny_features: Path
) -> None:
    notes = Notes()
    forgetful = replace(FORGETFUL, muon_rate=0.9, muon_decay=1.0, min_ratio=1.0)
    settings = replace(SHORT, optimizer=forgetful)
    run(tiny_target, tmp_path / "run", settings, features=tiny_features, progress=notes)
    (told,) = [line for line in notes.lines if "Lower train.optimizer.muon_rate" in line]
    assert told.startswith("muon_rate 0.9 times muon_decay 1 takes 90% off the matrices in a step")
