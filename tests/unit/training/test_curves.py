"""Curves on disk: appended, cut after a step, torn by a kill, copied to TensorBoard and W&B."""

import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import SilentProgress
from fledge.training.curves import CURVES_NAME, CurveLog, read_curves


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def write(log: CurveLog, *steps: int) -> None:
    for step in steps:
        log.add(step, "train", {"loss": 1.0 / step, "accuracy_at_depth": [0.5, None]}, {"s": 0.1})


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    with CurveLog(tmp_path, is_mirrored=False) as log:
        write(log, 1, 2)
        log.add(2, "decode", {"accept_length": 2.5})
        assert len(read_curves(tmp_path)) == 3, "flushed at once"
    records = read_curves(tmp_path)
    assert [(record.step, record.kind) for record in records] == [
        (1, "train"),
        (2, "train"),
        (2, "decode"),
    ]
    assert records[0].figures == {"loss": 1.0, "accuracy_at_depth": [0.5, None]}
    assert records[0].timing == {"s": 0.1}
    assert not (tmp_path / "tensorboard").exists()


def test_no_file_has_no_curves(tmp_path: Path) -> None:
    assert read_curves(tmp_path) == []


def test_a_torn_line_is_left_out_and_then_removed(tmp_path: Path) -> None:
    with CurveLog(tmp_path, is_mirrored=False) as log:
        write(log, 1, 2)
    path = tmp_path / CURVES_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert [record.step for record in read_curves(tmp_path)] == [1]
    with CurveLog(tmp_path, is_mirrored=False) as log:
        write(log, 2)
    assert path.read_bytes() == whole


def test_cut_after_a_step_and_gone_on_gives_the_same_bytes(tmp_path: Path) -> None:
    with CurveLog(tmp_path / "whole", is_mirrored=False) as log:
        write(log, 1, 2, 3, 4)
    with CurveLog(tmp_path / "cut", is_mirrored=False) as log:
        write(log, 1, 2, 3)
    with CurveLog(tmp_path / "cut", is_mirrored=False) as log:
        log.truncate_after(2)
        write(log, 3, 4)
    whole, cut = ((tmp_path / name / CURVES_NAME).read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_many_steps_are_thinned_evenly(tmp_path: Path) -> None:
    with CurveLog(tmp_path, is_mirrored=False) as log:
        for step in range(1, 11):
            write(log, step)
            if step % 5 == 0:
                log.add(step, "decode", {"accept_length": 2.0})
    few = read_curves(tmp_path, most_steps=4)
    assert [record.step for record in few if record.kind == "train"] == [1, 4, 7, 10]
    assert [record.step for record in few if record.kind == "decode"] == [5, 10]
    assert read_curves(tmp_path, most_steps=10) == read_curves(tmp_path)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / CURVES_NAME).write_text('{"step": 1, "kind": "train", "figures": {}}\n???\n')
    with pytest.raises(ArtifactError, match=r"curves.jsonl is damaged in line 2"):
        read_curves(tmp_path)


def test_what_is_not_a_number_could_not_be_measured(tmp_path: Path) -> None:
    with CurveLog(tmp_path, is_mirrored=False) as log:
        log.add(1, "train", {"loss": float("nan"), "loss_at_depth": [1.0, float("inf")]})
    assert read_curves(tmp_path)[0].figures == {"loss": None, "loss_at_depth": [1.0, None]}


def test_tensorboard_shows_a_resumed_run_once(tmp_path: Path) -> None:
    with CurveLog(tmp_path) as log:
        write(log, 1, 2, 3)
        for step in (1, 2, 3):
            log.add(step, "held_out", {"loss": float(step)})
    time.sleep(1.0)  # TensorBoard reads files by their names, which have the second and a number
    with CurveLog(tmp_path) as log:
        log.truncate_after(1)
        log.add(2, "held_out", {"loss": 2.5})
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    held_out = shown.Scalars("held_out/loss")
    assert [(event.step, event.value) for event in held_out] == [(1, 1.0), (2, 2.5)]
    assert [event.step for event in shown.Scalars("train/loss")] == [1], "one a second at most"
    assert shown.Scalars("train/accuracy_at_depth/1")[0].value == 0.5
    assert "train/accuracy_at_depth/2" not in shown.Tags()["scalars"]
    assert shown.Scalars("train/s")


def test_training_goes_on_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    notes = Notes()
    with CurveLog(tmp_path, progress=notes) as log:
        write(log, 1, 2)
    assert len(read_curves(tmp_path)) == 2
    assert ["TensorBoard is not installed" in line for line in notes.lines] == [True]


class TestWeightsAndBiases:
    @pytest.fixture(autouse=True)
    def _clean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """A stand-in for the package, which is no dependency of ours."""
        calls: list[dict[str, Any]] = []
        run = SimpleNamespace(log=calls.append, finish=lambda: None)
        run.define_metric = lambda name, step_metric: calls.append({name: step_metric})
        package = ModuleType("wandb")
        package.init = lambda **options: (calls.append(options), run)[1]  # type: ignore[attr-defined]
        package.Settings = SimpleNamespace  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "wandb", package)
        return calls

    def test_only_when_it_is_set_up(self, tmp_path: Path, calls: list[dict[str, Any]]) -> None:
        with CurveLog(tmp_path) as log:
            write(log, 1)
        assert calls == []

    def test_offline_without_a_key(
        self, tmp_path: Path, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WANDB_PROJECT", "heads")
        with CurveLog(tmp_path) as log:
            write(log, 4)
        options, metric, line = calls
        assert (options["mode"], options["project"]) == ("offline", "heads")
        assert metric == {"*": "step"}
        with CurveLog(tmp_path) as log:
            write(log, 5)
        assert calls[3]["id"] == options["id"], "a resumed run is the same run"
        expected = {"train/loss": 0.25, "train/accuracy_at_depth/1": 0.5, "train/s": 0.1, "step": 4}
        assert line == expected

    def test_a_missing_package_is_a_note(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setitem(sys.modules, "wandb", None)
        notes = Notes()
        with CurveLog(tmp_path, progress=notes) as log:
            write(log, 1)
        assert any("wandb is not installed" in line for line in notes.lines)
