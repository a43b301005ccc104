"""Tunings with real engines: the search, going on after a kill, and what ends them.

A made-up clock says what a pass costs with each shape, so that a busy machine prefers none.
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
    MeasurementError,
    MismatchError,
)
from fledge.contracts.progress import SilentProgress
from fledge.contracts.settings import TreeSettings
from fledge.contracts.tune_settings import TuneSettings
from fledge.contracts.tuned_settings import read_tuned
from fledge.data.regenerate.journal import NOWHERE, Journal, read_entries
from fledge.engine.engine import Engine
from fledge.lab import tune_search
from fledge.lab.report_sources import read_sources
from fledge.lab.report_tune import tune_charts
from fledge.lab.select_stage import JOURNAL_NAME
from fledge.lab.tune_document import read_tuning
from fledge.lab.tune_plan import plan_tuning
from fledge.lab.tune_stage import prepare_tuning, tune
from fledge.models.head_files import load_head, save_head
from fledge.models.target import Target
from fledge.store.manifest import Manifest
from fledge.testing import save_tiny_target, tiny_head

BEST = TreeSettings(depth=4, width=2, budget=6)
"""What the made-up clock makes fastest; it is not in the coarse grid."""

SETTINGS = TuneSettings(
    suites=("own.jsonl",),
    max_tokens=2,
    repeats=1,
    warm_up=0,
    depths=(1, 3, 4, 5),
    widths=(1, 2, 4),
    budgets=(4, 6, 8),
    controllers=("fixed",),
    rounds=2,
    finalists=2,
)


def made_up(engine: Engine) -> float:
    """Seconds: every answer that is drafted costs more the farther its shape is from the best."""
    tree = engine.settings.tree
    if tree == TreeSettings():
        return 1000.0 * engine.stats.num_emitted
    far = 50 * abs(tree.depth - BEST.depth) + 20 * abs(tree.width - BEST.width)
    return (400.0 + far + 3 * abs(tree.budget - BEST.budget)) * engine.stats.num_emitted


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def run(
    head: Path,
    target: Path,
    out: Path,
    settings: TuneSettings = SETTINGS,
    notes: Notes | None = None,
) -> Manifest:
    shown = notes or Notes()
    job = prepare_tuning(head, str(target), settings, device="cpu", progress=shown)
    return tune(job, settings, out, progress=shown, clock=made_up)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a suite, a random target and a random head for it."""
    folder = tmp_path_factory.mktemp("tune")
    save_tiny_target(folder / "target", max_position_embeddings=96)
    target = Target.load(folder / "target", dtype=torch.float32, device=torch.device("cpu"))
    save_head(tiny_head(target), folder / "head")
    rows = [{"prompt": f"{i} + 1?", "task": f"task {i % 2}"} for i in range(4)]
    (folder / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setenv("FLEDGE_CACHE", str(place / "cache"))
    return place


HEAD, TARGET = Path("head"), Path("target")


@pytest.fixture
def whole(there: Path) -> Path:
    """A tuning that nobody interrupted; the same for all tests."""
    run(HEAD, TARGET, there / "whole")
    return there / "whole"


def figures(out: Path) -> dict[str, Any]:
    """The document without what a clock said."""
    document = read_tuning(out)
    del document["provenance"]
    return document


def shape_of(row: dict[str, Any]) -> TreeSettings:
    return TreeSettings(**{name: row[name] for name in ("depth", "width", "budget")})


def test_the_search_finds_what_the_clock_makes_fastest(whole: Path) -> None:
    document = read_tuning(whole)
    best = document["best"]
    assert (shape_of(best), best["controller"], best["state"]) == (BEST, "fixed", "final")
    assert best["speedup"] == pytest.approx(2.5, rel=0.05)
    assert best["ci"][0] <= best["speedup"] <= best["ci"][1]
    assert document["verdict"].startswith("depth 4, width 2, budget 6, fixed: 2.")
    assert (document["state"], document["ties"], document["concurrency"]) == ("finished", [], 1)
    assert (document["chain"]["depth"], document["chain"]["state"]) == (4, "final")
    assert all(row["differences"]["num_different"] == 0 for row in document["rows"])
    assert {row["depth"] for row in document["rows"]} == {1, 3, 4, 5}
    tried = {row["num_visits"] for row in document["rows"] if row["state"] == "tried"}
    assert tried == {2, 4}, "slower shapes were given up after two visits"
    page = (whole / "tune.md").read_text()
    assert "| depth | width 1 | width 2 | width 4 |" in page
    assert f"| 4 | {document['chain']['speedup']:.2f} (4) | {best['speedup']:.2f} (6) |" in page


def test_what_others_read(whole: Path) -> None:
    tuned = read_tuned(whole)
    assert (tuned.tree, tuned.chain, tuned.controller) == (BEST, 4, "fixed")
    assert tuned.made_for is not None
    assert (tuned.made_for.target, tuned.made_for.head) == ("target", "head")
    (source,) = read_sources([whole])
    assert source.is_complete
    names = [chart.name for chart in tune_charts([source])]
    assert names[:2] == ["surface-speedup-whole", "surface-accept-length-whole"]


def test_the_plan_is_not_exceeded(whole: Path) -> None:
    job = prepare_tuning(HEAD, str(TARGET), SETTINGS, device="cpu", progress=Notes())
    planned, cost = plan_tuning(job, SETTINGS), read_tuning(whole)["cost"]
    assert (planned.shapes, planned.visits, planned.questions) == (7, 4, 4)
    assert planned.rungs == (
        {"num_heads": 7, "num_visits": 2},
        {"num_heads": 4, "num_visits": 4},
    )
    assert planned.answers_of_grid == 2 * (7 + 1) + 2 * (4 + 1)
    assert planned.answers_of_final == 4 * (3 + 1)
    assert planned.answers_of_grid < cost["runs"] <= planned.answers
    assert planned.answers_of_whole_lattice == cost["runs_of_whole_lattice"]


def test_a_killed_run_goes_on_where_it_was(whole: Path, tmp_path: Path) -> None:
    """All that kill -9 can leave: some whole lines, half of another, hidden files."""
    lines = (whole / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    out, num_lines = tmp_path / "killed", len(lines) // 2
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("manifest.json", "tune.*"))
    (out / JOURNAL_NAME).write_bytes(b"".join(lines[:num_lines]) + lines[num_lines][:40])
    (out / ".tune.json.tmp").write_bytes(b"{")
    notes = Notes()
    run(HEAD, TARGET, out, notes=notes)
    assert f"{num_lines} visits were made before." in notes.lines
    assert figures(out) == figures(whole)
    assert (out / JOURNAL_NAME).read_bytes() == (whole / JOURNAL_NAME).read_bytes()


def test_a_finished_tuning_stays_and_others_are_refused(whole: Path) -> None:
    before = (whole / "tune.json").stat().st_mtime_ns
    assert run(HEAD, TARGET, whole).counts["best"]["depth"] == 4
    assert (whole / "tune.json").stat().st_mtime_ns == before
    with pytest.raises(MismatchError, match=r"finished work with settings.seed = 0"):
        run(HEAD, TARGET, whole, replace(SETTINGS, seed=1))


def rewritten(
    whole: Path, out: Path, edit: Callable[[dict[str, Any]], None], *, keep: int | None = None
) -> Path:
    """The journal of a finished run up to some visit, as if other things had happened."""
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("manifest.json", "tune.*"))
    (out / JOURNAL_NAME).unlink()
    with Journal(out / JOURNAL_NAME) as journal:
        for entry in list(read_entries(whole / JOURNAL_NAME))[:keep]:
            assert entry is not None
            table = entry.payload
            edit(table)
            journal.append(entry.kind, entry.row, NOWHERE, table)
    return out


def fail_short(table: dict[str, Any]) -> None:
    for name, measured in table["arms"].items():
        if name.startswith("depth 1,"):
            measured["answers"][0]["error"] = "its logits are not numbers."


def test_shapes_that_fail_are_given_up_and_what_is_there_is_kept(
    whole: Path, tmp_path: Path
) -> None:
    some = rewritten(whole, tmp_path / "some", fail_short)
    notes = Notes()
    run(HEAD, TARGET, some, notes=notes)
    document = read_tuning(some)
    failed = [row for row in document["rows"] if row["state"] == "failed"]
    assert [(row["depth"], row["speedup"], row["num_visits"]) for row in failed] == [
        (1, None, 2)
    ] * 2
    assert shape_of(document["best"]) == BEST
    assert "- depth 1, width 1, budget 1, fixed: its logits" in (some / "tune.md").read_text()
    assert any(line.endswith("is given up: its logits are not numbers.") for line in notes.lines)


def test_when_all_shapes_fail(there: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, depths=(1,), widths=(1,))
    run(HEAD, TARGET, tmp_path / "one", settings)
    every = rewritten(tmp_path / "one", tmp_path / "every", fail_short, keep=1)
    with pytest.raises(MeasurementError, match="no shape is left of 1 that were tried; depth 1"):
        run(HEAD, TARGET, every, settings)
    assert read_tuning(every)["state"] == "unfinished"
    assert "**Unfinished**" in (every / "tune.md").read_text()


def test_a_shape_that_changes_answers_does_not_count(whole: Path, tmp_path: Path) -> None:
    name = "depth 4, width 2, budget 6, fixed"

    def say_something_else(table: dict[str, Any]) -> None:
        if name in table["arms"]:
            answer, plain = (table["arms"][one]["answers"][0] for one in (name, "plain"))
            del answer["same"]
            answer["token_ids"] = [plain["token_ids"][0] + 1, *plain["token_ids"][1:]]
            answer["text"] = "?"

    out = rewritten(whole, tmp_path / "changed", say_something_else)
    run(HEAD, TARGET, out)
    document = read_tuning(out)
    assert shape_of(document["best"]) != BEST
    error = next(row["error"] for row in document["rows"] if shape_of(row) == BEST)
    assert "differs from plain decoding at token 0, where the logits are" in error


def test_several_loads_and_the_adaptive_controller(there: Path, tmp_path: Path) -> None:
    settings = replace(
        SETTINGS,
        depths=(2,),
        widths=(1,),
        concurrency=(1, 3),
        repeats=1,
        warm_up=1,
        controllers=("fixed", "adaptive"),
    )
    run(HEAD, TARGET, tmp_path / "out", settings)
    document = read_tuning(tmp_path / "out")
    names = [(row["depth"], row["controller"]) for row in document["rows"]]
    assert names == [(2, "fixed"), (2, "adaptive"), (6, "adaptive")], "the last is the default"
    assert document["concurrency"] == [1, 3]
    first = document["rows"][0]
    assert [one["concurrency"] for one in first["loads"]] == [1, 3]
    assert all(one["speedup"] > 0 for one in first["loads"])
    # Four visits one at a time, and two of two prompts, which are three at once.
    assert first["num_visits"] == 6
    assert [one["num_answers"] for one in document["plain"]] == [8, 12]
    assert "how surely is not known" in document["verdict"], "one group of three at once"


def test_a_head_that_slows_down_is_named_as_such(whole: Path, tmp_path: Path) -> None:
    def slow_down(table: dict[str, Any]) -> None:
        for name, measured in table["arms"].items():
            measured["seconds"] *= 1 if name == "plain" else 10

    out = rewritten(whole, tmp_path / "slow", slow_down)
    run(HEAD, TARGET, out)
    assert "this is slower, so serve without a head" in read_tuning(out)["verdict"]


def test_heads_that_cannot_be_tuned(there: Path, tmp_path: Path) -> None:
    head = load_head(HEAD)
    with torch.no_grad():
        next(head.parameters()).fill_(torch.nan)
    save_head(head, tmp_path / "nan")
    with pytest.raises(MeasurementError, match="nan cannot be tuned: fc.weight holds values"):
        run(tmp_path / "nan", TARGET, tmp_path / "out")
    save_tiny_target(tmp_path / "wide", hidden_size=64)
    with pytest.raises(MismatchError, match="head does not belong to this target"):
        run(HEAD, tmp_path / "wide", tmp_path / "out")
    for step in (1, 2):
        shutil.copytree(HEAD, tmp_path / "run" / "checkpoints" / f"step-{step}")
    with pytest.raises(ArtifactError, match="holds 2 heads and none that is finished; name one"):
        run(tmp_path / "run", TARGET, tmp_path / "out")


def test_a_target_that_answers_nothing_ends_the_run(there: Path, tmp_path: Path) -> None:
    shutil.copytree(TARGET, tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(MeasurementError, match="plain decoding answered none of 2 questions"):
        run(HEAD, tmp_path / "target", tmp_path / "out")
    assert read_tuning(tmp_path / "out")["verdict"] == "nothing was measured."


def test_too_little_memory(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(tune_search, "ShapeArms", no_room)
    with pytest.raises(CapacityError, match="no room for 7 shapes at once; lower together"):
        run(HEAD, TARGET, tmp_path / "out")


def test_documents_of_others(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="give a directory that `fledge tune` made"):
        read_tuning(tmp_path)
    (tmp_path / "tune.json").write_text("{")
    with pytest.raises(ArtifactError, match="is damaged"):
        read_tuning(tmp_path)
    (tmp_path / "tune.json").write_text('{"schema": 0}')
    with pytest.raises(ArtifactError, match="is no tuning of layout 1"):
        read_tuning(tmp_path)
