"""`tools/ship_head.py` takes what the stages wrote, and refuses what is none of it."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from fledge.models.head_files import load_head
from fledge.store.manifest import HEAD
from fledge.testing import save_tiny_target
from fledge.training.starting_head import StartingHead
from tests.shipped_pairs import save_random_head, training_manifest
from tests.unit.lab.test_shipping import data_card, fingerprint, scorecard

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import ship_head

    module: ModuleType = ship_head
    return module


def test_a_checkpoint_becomes_a_shipped_head(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = save_tiny_target(tmp_path / "tiny")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000014"
    checkpoint.parent.mkdir(parents=True)
    save_random_head(target, checkpoint)
    training_manifest(target).write(tmp_path / "run")
    (tmp_path / "card.json").write_text(json.dumps(data_card()))
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    (chosen / "scorecard.json").write_text(json.dumps(scorecard(fingerprint(checkpoint))))

    def ship(*more: object) -> int:
        words = [checkpoint, "--target", target, "--root", tmp_path / "heads", *more]
        monkeypatch.setattr(sys, "argv", ["ship_head.py", *map(str, words)])
        return int(tool.main())

    assert ship("--data", tmp_path, "--select", chosen) == 0
    card = (tmp_path / "heads" / "tiny" / "README.md").read_text()
    assert "| checkpoint | step-00000014 |" in card
    assert "| gsm8k | 3.25" in card
    for options, message in (
        (("--select", tmp_path / "card.json"), "card.json is no scorecard"),
        (("--tuned", f"cpu={tmp_path}", "here"), "tune.json cannot be read"),
        (("--tuned", "here"), "--tuned here is not of the form cpu=DIR"),
        (("--bench", tmp_path / "none"), "none cannot be read"),
    ):
        assert ship(*options) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "run" / "manifest.json").unlink()
    assert ship() == 1
    assert "neither a finished run of `fledge train` nor a checkpoint" in capsys.readouterr().err


def test_a_head_names_the_runs_it_went_on_from(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = save_tiny_target(tmp_path / "tiny")
    first, second = (save_random_head(target, tmp_path / name) for name in ("first", "second"))
    training = training_manifest(target)
    training.write(first)
    began = StartingHead(first, load_head(first).float()).fingerprint
    plan = replace(training.plan, parents={HEAD: began})
    replace(training, plan=plan, counts={**training.counts, "steps": 99}).write(second)

    def ship(head: Path, *more: object) -> int:
        words = [head, "--target", target, "--root", tmp_path / "heads", *more]
        monkeypatch.setattr(sys, "argv", ["ship_head.py", *map(str, words)])
        return int(tool.main())

    assert ship(second, "--earlier", first) == 0
    card = (tmp_path / "heads" / "tiny" / "README.md").read_text()
    assert "2 runs, each going on from the head of the one before." in card
    assert "| steps | 28 | 99 |" in card
    assert card.count("| train | `fledge train` |") == 2
    capsys.readouterr()
    for words, began in (((second,), "another"), ((first, "--earlier", first), "no other")):
        assert ship(*words) == 1
        assert f"went on from {began} head, and --earlier says otherwise" in capsys.readouterr().err
