"""Spaces, proposals and early stopping: pure functions of what is there."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.contracts.sweep_settings import EarlyStop, SweepSettings
from fledge.contracts.train_settings import TrainSettings
from fledge.training.sweep.proposals import count_trials, propose
from fledge.training.sweep.pruning import is_hopeless
from fledge.training.sweep.space import apply_values, check_space, describe, list_grid
from fledge.training.sweep.trials import Result, Trial, list_trials, trial_directory

RATE, STEPS = "train.optimizer.learning_rate", "train.loss.steps"
GRID = {RATE: [1e-4, 4e-4], STEPS: [3, 5, 7]}
BOUNDS: dict[str, Any] = {
    RATE: {"low": 1e-5, "high": 1e-2, "log": True},
    "train.head.mlp_width": {"low": 64, "high": 256, "step": 64},
    "train.optimizer.betas": [[0.9, 0.95], [0.9, 0.99]],
    "train.loss.kind": ["soft_cross_entropy", "acceptance"],
}


def test_values_become_settings() -> None:
    settings = apply_values(TrainSettings(), {RATE: 1e-3, STEPS: 2, "train.epochs": 9})
    assert settings.optimizer.learning_rate == 1e-3
    assert (settings.loss.steps, settings.epochs) == (2, 9)
    assert apply_values(TrainSettings(), {}) == TrainSettings()
    assert describe({RATE: 0.00040001, STEPS: 2}) == "learning_rate=0.0004, steps=2"


def test_a_grid_has_every_combination() -> None:
    settings = SweepSettings(space=GRID)
    assert list_grid(settings)[:4] == [
        {RATE: 1e-4, STEPS: 3},
        {RATE: 1e-4, STEPS: 5},
        {RATE: 1e-4, STEPS: 7},
        {RATE: 4e-4, STEPS: 3},
    ]
    assert count_trials(settings) == 6
    some = SweepSettings(space=GRID, trials=4)
    assert count_trials(some) == 4
    assert all(values in list_grid(settings) for values in list_grid(some))
    assert list_grid(some) != list_grid(SweepSettings(space=GRID, trials=4, seed=5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"space": {"train.lr": [1]}}, "varies train.lr, and there is no such setting; known: tr"),
        ({"space": {"train.epochs.x": [1]}}, "train.epochs.x, and there is no such setting"),
        ({"space": {"train.epochs": [1, "a"]}}, "'a'; it must be a whole number"),
        ({"space": {"train.epochs": [1, 0]}}, "the sweep's trial with epochs=0: in train: epochs"),
        (
            {"method": "tpe", "space": {"train.dtype": {"low": 1, "high": 2}}},
            "bounds for train.dtype, which is not a number",
        ),
        (
            {"method": "tpe", "space": {"train.epochs": {"low": 1, "high": 2.5}}},
            "2.5 as a bound or step of train.epochs, which is a whole number",
        ),
    ],
)
def test_a_bad_space_is_refused_before_anything_runs(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_space(SweepSettings(**settings), TrainSettings())


def test_settings_that_change_together_are_checked_together() -> None:
    space = {"train.batch_tokens": [4096, 8192], "train.micro_tokens": [1024, 4096]}
    check_space(SweepSettings(space=space), TrainSettings())
    space["train.micro_tokens"] = [1024, 8192]
    with pytest.raises(ConfigError, match="batch_tokens=4096, micro_tokens=8192: .*multiple"):
        check_space(SweepSettings(space=space), TrainSettings())


class TestEarlyStop:
    OTHERS = ((1.0, 2.0, 3.0), (1.0, 1.5, 2.0), (1.0, 1.2, 1.4), (1.0, 1.1))

    @pytest.mark.parametrize(
        ("rule", "own", "expected"),
        [
            ("median", (1.0, 1.0, 1.9), True),
            ("median", (1.0, 1.0, 2.0), False),
            ("median", (1.0, 2.5, 0.5), False),  # what it had reached counts
            ("median", (0.1, 0.1), False),  # before the grace is over
            ("median", (0.1,) * 4, False),  # nobody came as far
            ("none", (0.1, 0.1, 0.1), False),
            ("halving", (1.0, 1.0, 2.5), False),  # second of four
            ("halving", (1.0, 1.0, 1.9), True),  # third of four
            ("halving", (1.0,) * 5, False),  # no rung
        ],
    )
    def test_rules(self, rule: EarlyStop, own: tuple[float, ...], expected: bool) -> None:
        assert is_hopeless(rule, own, self.OTHERS, grace=3) is expected

    def test_few_peers_stop_nobody(self) -> None:
        assert not is_hopeless("median", (0.1, 0.1, 0.1), self.OTHERS[:2], grace=3)

    def test_rungs_are_powers_of_three(self) -> None:
        others = [(2.0,) * 30] * 5
        rungs = [n for n in range(1, 30) if is_hopeless("halving", (1.0,) * n, others, grace=2)]
        assert rungs == [2, 6, 18]


def ended(number: int, values: dict[str, Any], score: float | None, directory: Path) -> Trial:
    result = Result(state="failed" if score is None else "finished", score=score)
    return Trial(number=number, values=values, directory=directory, result=result)


def test_tpe_depends_on_seed_number_and_history_only(tmp_path: Path) -> None:
    settings = SweepSettings(method="tpe", trials=12, space=BOUNDS)

    def go(trials: int, history: list[Trial]) -> list[Trial]:
        for number in range(len(history) + 1, trials + 1):
            values = propose(settings, history, number)
            assert values is not None
            apply_values(TrainSettings(), values)
            # The wider the better, and one in five fails.
            score = None if number % 5 == 4 else values["train.head.mlp_width"] / 100
            history = [*history, ended(number, dict(values), score, tmp_path)]
        return history

    whole = go(12, [])
    assert go(12, whole[:7]) == whole, "killed and gone on with, it proposes the same"
    widths = [trial.values["train.head.mlp_width"] for trial in whole]
    assert set(widths) <= {64, 128, 192, 256}
    assert sum(widths[6:]) > sum(widths[:6]), "it learns what is good"
    assert propose(settings, whole, 13) is None
    other = propose(SweepSettings(method="tpe", seed=1, space=BOUNDS), [], 1)
    assert other != whole[0].values


def test_a_used_up_space_ends_tpe(tmp_path: Path) -> None:
    settings = SweepSettings(method="tpe", trials=9, space={"train.epochs": [1, 2, 3]})
    trials: list[Trial] = []
    while (values := propose(settings, trials, len(trials) + 1)) is not None:
        trials.append(ended(len(trials), dict(values), 1.0, tmp_path))
    assert sorted(trial.values["train.epochs"] for trial in trials) == [1, 2, 3]


def test_tpe_without_optuna_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    settings = SweepSettings(method="tpe", space=BOUNDS)
    with pytest.raises(ConfigError, match=r"pip install 'fledge\[sweep\]'"):
        propose(settings, [], 1)


def test_trials_come_back_from_disk(tmp_path: Path) -> None:
    first = Trial(number=1, values={STEPS: 3}, directory=trial_directory(tmp_path, 1))
    second = Trial(number=2, values={STEPS: 5}, directory=trial_directory(tmp_path, 2))
    for trial in (first, second):
        trial.begin()
    done = first.end(Result(state="finished", score=2.5, scores=[1.0, 2.5]))
    assert list_trials(tmp_path) == [done, second]
    (first.directory / "result.json").write_text("{")
    with pytest.raises(ArtifactError, match="0001 is damaged .* remove it"):
        list_trials(tmp_path)
