"""Sweeps with real trials: the table, failures, early stopping, and going on after a kill."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch

from fledge.contracts.capture_settings import CaptureSettings
from fledge.contracts.errors import CapacityError, ConfigError, MismatchError, TrainingError
from fledge.contracts.progress import SilentProgress
from fledge.contracts.sweep_settings import SweepSettings
from fledge.contracts.train_settings import (
    HeldOutSettings,
    LossSettings,
    OptimizerSettings,
    TrainSettings,
)
from fledge.training.sweep.stage import check_sweep, sweep
from fledge.training.sweep.trials import Result, Trial, list_trials, trial_directory
from fledge.training.train_input import TrainInput, open_input

BASE = TrainSettings(
    max_steps=4,
    batch_tokens=512,
    micro_tokens=256,
    loss=LossSettings(steps=2),
    optimizer=OptimizerSettings(learning_rate=1e-2),
    held_out=HeldOutSettings(share=0.05, every=2, decode_prompts=2, decode_tokens=12),
)
SETTINGS = SweepSettings(
    space={"train.micro_tokens": [256, 32], "train.optimizer.learning_rate": [1e-2, 1e-4]}
)


class Stopping(SilentProgress):
    """Interrupts the program at a note with a certain beginning."""

    def __init__(self, beginning: str) -> None:
        self._beginning = beginning

    def note(self, text: str) -> None:
        if text.startswith(self._beginning):
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def given(language_target: Path, language_corpus: Path) -> TrainInput:
    return open_input(
        features=None,
        corpora=[language_corpus],
        target=str(language_target),
        settings=BASE,
        capture=CaptureSettings(layers=(1, 2, 3)),
        is_capture_asked=True,
        device=torch.device("cpu"),
    )


@pytest.fixture(scope="module")
def whole(given: TrainInput, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that nobody interrupted: two trials run, two fail."""
    out = tmp_path_factory.mktemp("sweeps") / "whole"
    sweep(given, SETTINGS, BASE, out)
    return out


def test_a_sweep_ends_with_a_table_and_a_plot(whole: Path) -> None:
    rows = json.loads((whole / "sweep.json").read_text())["trials"]
    assert [row["state"] for row in rows] == ["finished", "finished", "failed", "failed"]
    assert [row["trial"] for row in rows[2:]] == [3, 4], "of micro_tokens = 32"
    assert rows[0]["accept_length"] >= rows[1]["accept_length"] >= 1.0
    assert rows[0]["planned_steps"] == rows[0]["steps"] == 4
    assert "32" in rows[2]["error"]
    assert (whole / rows[0]["run"] / "model.safetensors").is_file(), "a head like any other"
    assert (whole / "sweep.png").read_bytes().startswith(b"\x89PNG")
    page = (whole / "sweep.md").read_text()
    assert "| rank | trial | micro_tokens | learning_rate | accept length |" in page
    assert "- trial 3: " in page


def test_a_finished_sweep_stays_as_it_is(whole: Path, given: TrainInput) -> None:
    before = (whole / "sweep.json").stat().st_mtime_ns
    manifest = sweep(given, SETTINGS, BASE, whole)
    assert manifest.counts == {"trials": 4, "finished": 2, "stopped": 0, "failed": 2}
    assert (whole / "sweep.json").stat().st_mtime_ns == before
    with pytest.raises(MismatchError, match=r"finished work with settings.sweep.seed = 0"):
        sweep(given, SweepSettings(space=SETTINGS.space, seed=1), BASE, whole)


def test_an_interrupted_sweep_goes_on_where_it_was(
    whole: Path, given: TrainInput, tmp_path: Path
) -> None:
    out = tmp_path / "broken"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("manifest.json", "sweep.*"))
    for number in (2, 3, 4):
        shutil.rmtree(trial_directory(out, number))
    with pytest.raises(KeyboardInterrupt):
        # At its last measurement; the checkpoint before it is there.
        sweep(given, SETTINGS, BASE, out, progress=Stopping("step 4 of 4"))
    begun = list_trials(out)
    assert [trial.result is not None for trial in begun] == [True, False]
    kept = (begun[0].directory / "result.json").stat().st_mtime_ns
    assert not (out / "sweep.png").exists()
    sweep(given, SETTINGS, BASE, out)
    assert (begun[0].directory / "result.json").stat().st_mtime_ns == kept
    assert (out / "sweep.json").read_bytes() == (whole / "sweep.json").read_bytes()


def test_a_trial_that_falls_behind_is_given_up(given: TrainInput, tmp_path: Path) -> None:
    settings = SweepSettings(grace=1, space={"train.seed": [0, 1, 2, 3]})
    with pytest.raises(KeyboardInterrupt):
        sweep(given, settings, BASE, tmp_path, progress=Stopping("trial 1 of 4"))
    for number in (1, 2, 3):
        trial = Trial(
            number=number,
            values={"train.seed": number - 1},
            directory=trial_directory(tmp_path, number),
        )
        trial.begin()
        trial.end(Result(state="finished", score=9.0, scores=[9.0, 9.0]))
    manifest = sweep(given, settings, BASE, tmp_path)
    assert manifest.counts == {"trials": 4, "finished": 3, "stopped": 1, "failed": 0}
    last = list_trials(tmp_path)[-1].result
    assert last is not None
    assert (last.state, last.steps, last.planned_steps, len(last.scores)) == ("stopped", 2, 4, 1)
    assert "2 of 2 (given up)" in (tmp_path / "sweep.md").read_text()


def test_a_full_disk_ends_no_trial(
    given: TrainInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    settings = SweepSettings(space={"train.seed": [0]})
    monkeypatch.setattr("fledge.training.checkpoint.save_file", fail)
    with pytest.raises(CapacityError, match="run the same command again: it goes on"):
        sweep(given, settings, BASE, tmp_path)
    assert [trial.result for trial in list_trials(tmp_path)] == [None]
    monkeypatch.undo()
    assert sweep(given, settings, BASE, tmp_path).counts["finished"] == 1


def test_a_sweep_whose_trials_all_fail_says_why(given: TrainInput, tmp_path: Path) -> None:
    settings = SweepSettings(space={"train.micro_tokens": [32, 64]})
    with pytest.raises(TrainingError, match=r"all 2 trials failed; the first because .*32"):
        sweep(given, settings, BASE, tmp_path)


def test_trials_need_something_to_be_compared_on() -> None:
    base = TrainSettings(held_out=HeldOutSettings(share=0.0))
    with pytest.raises(ConfigError, match="held_out.share is 0, and trials are compared"):
        check_sweep(SETTINGS, base)
