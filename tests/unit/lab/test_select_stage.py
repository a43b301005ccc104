"""Selections with real engines: ranks, ties, going on after a kill, and what ends them.

Passes are counted instead of seconds, so that a busy machine ranks no head.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.contracts.errors import (
    ArtifactError,
    CapacityError,
    ConfigError,
    MeasurementError,
    MismatchError,
)
from fledge.contracts.progress import SilentProgress
from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.settings import TreeSettings
from fledge.data.regenerate.journal import NOWHERE, Journal, read_entries
from fledge.engine.engine import Engine
from fledge.lab import selection
from fledge.lab.candidates import find_candidates
from fledge.lab.scorecard import read_scorecard
from fledge.lab.select_job import prepare_job
from fledge.lab.select_stage import JOURNAL_NAME, select
from fledge.models.head import Eagle3Head
from fledge.models.head_files import load_head, save_head
from fledge.models.target import Target
from fledge.store.manifest import Manifest
from fledge.testing import save_tiny_target, tiny_head
from fledge.testing_language import ask

SETTINGS = SelectSettings(
    max_tokens=9,
    repeats=1,
    warm_up=0,
    tree=TreeSettings(depth=3, width=1, budget=3),
    controller="fixed",
)
ANIMALS = replace(SETTINGS, suites=("animals.jsonl",))


def count_passes(engine: Engine) -> float:
    """A pass costs 50, a draft 1: whole numbers, so that sums do not depend on what came before."""
    return 50 * engine.stats.num_passes + engine.stats.num_drafts


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def run(
    heads: list[Path],
    target: Path,
    out: Path,
    settings: SelectSettings = SETTINGS,
    progress: Notes | None = None,
) -> Manifest:
    shown = progress or Notes()
    job = prepare_job(heads, str(target), settings, device="cpu", progress=shown)
    return select(job, settings, out, progress=shown, clock=count_passes)


def change(directory: Path, out: Path, spoil: Callable[[Eagle3Head], object]) -> Path:
    head = load_head(directory)
    with torch.no_grad():
        spoil(head)
    save_head(head, out)
    return out


def add_noise(head: Eagle3Head) -> None:
    source = torch.Generator().manual_seed(0)
    for weight in head.parameters():
        weight += torch.randn(weight.shape, generator=source) * weight.std() * 3


@pytest.fixture(scope="module")
def place(
    language_run: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """A folder with a suite and heads: the trained one, a copy of it, and one with noise."""
    folder = tmp_path_factory.mktemp("select")
    rows = [{"prompt": one, "task": f"task {i % 2}"} for i, one in enumerate(ask(6, seed=41))]
    (folder / "animals.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    newest = sorted((language_run / "checkpoints").iterdir())[-1]
    shutil.copytree(newest, folder / "trained")
    shutil.copytree(newest, folder / "copy")
    change(newest, folder / "noisy", add_noise)
    change(newest, folder / "broken", lambda head: next(head.parameters()).fill_(torch.nan))
    return folder


@pytest.fixture
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


HEADS = [Path(name) for name in ("noisy", "trained", "copy", "broken")]


@pytest.fixture
def whole(there: Path, language_target: Path) -> Path:
    """A selection that nobody interrupted; the same for all tests."""
    run(HEADS, language_target, there / "whole", ANIMALS)
    return there / "whole"


def figures(out: Path) -> dict[str, Any]:
    """The scorecard without what a clock said."""
    card = read_scorecard(out)
    del card["provenance"]
    return card


def test_the_noisy_head_is_last_and_copies_are_tied(whole: Path) -> None:
    card = read_scorecard(whole)
    ranked = {one["name"]: one for one in card["heads"]}
    assert [one["rank"] for one in card["heads"]] == [1, 2, 3, None]
    assert (card["best"], card["ties"]) == ("trained", ["copy"])
    assert card["verdict"].endswith("it cannot be told apart from copy.")
    assert ranked["copy"]["behind_best"]["value"] == 0.0
    assert ranked["noisy"]["rank"] == 3
    assert not ranked["noisy"]["is_tied_with_best"]
    assert ranked["noisy"]["behind_best"]["low"] > 0
    assert ranked["noisy"]["accept_length"]["value"] < ranked["trained"]["accept_length"]["value"]
    assert ranked["broken"]["error"] == "fc.weight holds values that are no numbers."
    for one, count in (("trained", 6), ("copy", 6), ("noisy", 4)):
        found = ranked[one]["differences"]
        assert (found["num_compared"], found["num_different"]) == (count, 0)
    assert [one["state"] for one in card["heads"]][:3] == ["measured", "measured", "given up"]
    page = (whole / "scorecard.md").read_text()
    assert "| 1 | trained |" in page
    assert "- broken: fc.weight holds" in page


def test_a_run_brings_all_its_checkpoints(language_run: Path, there: Path) -> None:
    found = find_candidates([language_run, there / "trained", there / "trained"])
    steps = [one.directory.name for one in found]
    assert steps == ["step-00000014", "step-00000028", "trained"]
    with pytest.raises(ArtifactError, match="there is no directory nowhere"):
        find_candidates([Path("nowhere")])
    with pytest.raises(ArtifactError, match="holds neither a head"):
        find_candidates([language_run / "checkpoints"])
    with pytest.raises(ArtifactError, match="no head was named"):
        find_candidates([])


def test_a_killed_run_goes_on_where_it_was(
    whole: Path, language_target: Path, tmp_path: Path
) -> None:
    """All that kill -9 can leave: some whole lines, half of another, hidden files."""
    out = tmp_path / "killed"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("manifest.json", "scorecard.*"))
    lines = (whole / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    (out / JOURNAL_NAME).write_bytes(b"".join(lines[:4]) + lines[4][:40])
    (out / ".scorecard.json.tmp").write_bytes(b"{")
    notes = Notes()
    run(HEADS, language_target, out, ANIMALS, notes)
    assert "4 of 6 visits were made before." in notes.lines
    assert figures(out) == figures(whole)
    assert (out / JOURNAL_NAME).read_bytes() == (whole / JOURNAL_NAME).read_bytes()


def test_a_finished_scorecard_stays_and_others_are_refused(
    whole: Path, language_target: Path
) -> None:
    before = (whole / "scorecard.json").stat().st_mtime_ns
    counts = run(HEADS, language_target, whole, ANIMALS).counts
    assert (counts["best"], counts["visits"]) == ("trained", {"done": 6, "planned": 6})
    assert (whole / "scorecard.json").stat().st_mtime_ns == before
    with pytest.raises(MismatchError, match=r"finished work with settings.seed = 0"):
        run(HEADS, language_target, whole, replace(ANIMALS, seed=1))
    with pytest.raises(MismatchError, match="finished work with parents.head noisy"):
        run(HEADS[1:], language_target, whole, ANIMALS)


def rewritten(whole: Path, out: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """The journal of a finished run, as if other things had happened."""
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("manifest.json", "scorecard.*"))
    (out / JOURNAL_NAME).unlink()
    with Journal(out / JOURNAL_NAME) as journal:
        for entry in read_entries(whole / JOURNAL_NAME):
            assert entry is not None
            table = entry.payload
            edit(table)
            journal.append(entry.kind, entry.row, NOWHERE, table)
    return out


def test_heads_that_fail_are_given_up_and_what_is_there_is_kept(
    whole: Path, language_target: Path, tmp_path: Path
) -> None:
    def fail(*names: str) -> Callable[[dict[str, Any]], None]:
        def edit(table: dict[str, Any]) -> None:
            for name in set(names) & set(table["arms"]):
                table["arms"][name]["answers"][0]["error"] = "its logits are not numbers."

        return edit

    one = rewritten(whole, tmp_path / "one", fail("trained"))
    run(HEADS, language_target, one, ANIMALS)
    card = read_scorecard(one)
    assert card["best"] == "copy"
    assert [each["error"] for each in card["heads"] if each["name"] == "trained"] == [
        "its logits are not numbers."
    ]
    every = rewritten(whole, tmp_path / "every", fail("trained", "copy", "noisy"))
    with pytest.raises(MeasurementError, match="all 4 heads failed; of broken: fc.weight holds"):
        run(HEADS, language_target, every, ANIMALS)
    assert read_scorecard(every)["state"] == "unfinished"
    assert "**Unfinished**" in (every / "scorecard.md").read_text()


def test_a_head_that_changes_answers_is_not_ranked(
    whole: Path, language_target: Path, tmp_path: Path
) -> None:
    def say_something_else(table: dict[str, Any]) -> None:
        answer = table["arms"]["trained"]["answers"][0]
        plain = table["arms"]["plain"]["answers"][0]
        del answer["same"]
        answer["token_ids"] = [plain["token_ids"][0] + 1, *plain["token_ids"][1:]]
        answer["text"] = "?"

    out = rewritten(whole, tmp_path / "changed", say_something_else)
    run(HEADS, language_target, out, ANIMALS)
    card = read_scorecard(out)
    assert card["best"] == "copy"
    error = next(one["error"] for one in card["heads"] if one["name"] == "trained")
    assert "differs from plain decoding at token 0, where the logits are" in error


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target and two random heads for it."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_target(folder / "target", max_position_embeddings=96)
    target = Target.load(folder / "target", dtype=torch.float32, device=torch.device("cpu"))
    for seed in range(2):
        save_head(tiny_head(target, seed=seed), folder / f"head-{seed}")
    rows = [
        {"task": "talk", "turns": ["Hi", "And now?"]},
        {"task": "talk", "turns": ["x" * 84, "y"]},
        {"task": "sums", "prompt": "1 + 1?", "answer": 2},
        {"task": "sums", "prompt": "2 + 1?", "answer": 3},
    ]
    (folder / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_halving_sampling_and_load(tiny: Path, tmp_path: Path) -> None:
    settings = replace(
        SETTINGS,
        suites=(str(tiny / "own.jsonl"),),
        max_tokens=3,
        temperature=1.0,
        concurrency=2,
        repeats=3,
        finalists=1,
    )
    notes = Notes()
    heads = [tiny / "head-0", tiny / "head-1"]
    run(heads, tiny / "target", tmp_path / "out", settings, notes)
    card = read_scorecard(tmp_path / "out")
    assert [one["state"] for one in card["heads"]] == ["measured", "given up"]
    assert [one["num_visits"] for one in card["heads"]] == [6, 4]
    assert "left out as too long for the target's context: 1 of 6 questions." in notes.lines
    assert any(
        line.startswith("after 4 visits, heads that go on: 1; given up: ") for line in notes.lines
    )
    cost = card["cost"]
    assert cost["runs"] == cost["runs_planned"] < cost["runs_without_halving"]
    assert card["heads"][0]["speed_up_before_loops"] is None, "not known under load"
    assert all(one["differences"]["num_different"] == 0 for one in card["heads"])
    assert card["plain"]["scores"] == card["heads"][0]["scores"]
    assert sum(card["plain"]["scores"]["sums"].values()) == 2
    page = (tmp_path / "out" / "scorecard.md").read_text()
    assert "Left out as too long for the context: 1 questions." in page
    assert "saved)." in page


def test_a_head_of_another_target_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "wide", hidden_size=64)
    with pytest.raises(
        MismatchError, match=r"head-0 does not belong to this target: the head was made for"
    ):
        run([tiny / "head-0"], tmp_path / "wide", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(ArtifactError, match="empty"):
        run([tmp_path / "empty"], tiny / "target", tmp_path / "out")


def test_heads_that_are_no_numbers_leave_nothing_to_measure(tiny: Path, tmp_path: Path) -> None:
    spoilt = change(
        tiny / "head-0", tmp_path / "nan", lambda head: next(head.parameters()).fill_(torch.inf)
    )
    with pytest.raises(MeasurementError, match="no head can be measured; of .*nan, fc.weight"):
        run([spoilt], tiny / "target", tmp_path / "out")


def test_a_target_that_answers_nothing_ends_the_run(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "target", tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, file, metadata={"format": "pt"})
    rows = tmp_path / "own.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    settings = replace(SETTINGS, suites=(str(rows),), max_tokens=3)
    with pytest.raises(MeasurementError, match="plain decoding answered none of 1 questions: "):
        run([tiny / "head-0"], tmp_path / "target", tmp_path / "out", settings)
    assert read_scorecard(tmp_path / "out")["best"] is None


def test_too_little_memory_is_said(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(selection, "Arms", fail)
    settings = replace(SETTINGS, suites=(str(tiny / "own.jsonl"),), max_tokens=3)
    with pytest.raises(CapacityError, match="cpu has no room for 1 heads beside the target"):
        run([tiny / "head-0"], tiny / "target", tmp_path / "out", settings)


def test_settings_that_cannot_be_used(tiny: Path, tmp_path: Path) -> None:
    for values, words in (
        ({"suites": ()}, "suites is empty"),
        ({"max_tokens": 1}, "max_tokens is 1; it must be at least 2"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"controller": "none"}, "controller is 'none'"),
    ):
        with pytest.raises(ConfigError, match=words):
            SelectSettings(**values)
    with pytest.raises(ConfigError, match="the suite builtin is named twice"):
        run(
            [tiny / "head-0"], tiny / "target", tmp_path, replace(SETTINGS, suites=("builtin",) * 2)
        )


def test_one_prompt_says_nothing_about_others(tiny: Path, tmp_path: Path) -> None:
    rows = tmp_path / "own.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    settings = replace(SETTINGS, suites=(str(rows),), max_tokens=3)
    run([tiny / "head-0", tiny / "head-1"], tiny / "target", tmp_path / "out", settings)
    card = read_scorecard(tmp_path / "out")
    assert "how surely is not known: a task had one prompt only" in card["verdict"]
    assert len(card["ties"]) == 1
    assert "[unknown]" in (tmp_path / "out" / "scorecard.md").read_text()


def test_scorecards_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="give a directory that `fledge select` made"):
        read_scorecard(tmp_path)
    for text, words in (("{", "is damaged"), ("[]", "is no scorecard of layout 1")):
        (tmp_path / "scorecard.json").write_text(text)
        with pytest.raises(ArtifactError, match=words):
            read_scorecard(tmp_path)
