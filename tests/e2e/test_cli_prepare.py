"""`fledge prepare` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fledge.data import prepare as stage
from fledge.data import prepare_estimate
from fledge.store import capacity
from fledge.store.rows import read_rows
from fledge.testing import tiny_tokenizer
from tests.e2e.conftest import RunProgram
from tests.unit.data.self_support import writing_engine

RECIPE = """
[prepare]
licences = ["MIT"]

[[prepare.sources]]
name = "rivers"
path = "data/rivers.jsonl"
licence = "MIT"

[[prepare.sources]]
name = "lakes"
path = "data/lakes.txt"
licence = "MIT"
weight = 3
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe in a directory of its own, with paths that are relative to it."""
    data = tmp_path / "project" / "data"
    data.mkdir(parents=True)
    rivers = [{"prompt": f"How long is river number {number}?"} for number in range(30)]
    (data / "rivers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rivers))
    (data / "lakes.txt").write_text("".join(f"Is lake {i} deep?\n" for i in range(20)) + "\n")
    path = tmp_path / "project" / "recipe.toml"
    path.write_text(RECIPE)
    return path


def test_a_recipe_becomes_a_directory(run: RunProgram, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = run("prepare", recipe, "--out", out)
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout == f"{out}\n"
    assert "rivers.jsonl: prompts from field `prompt`" in outcome.stderr
    assert "rivers: 30 read, 30 kept, 30 in the blend" in outcome.stderr
    assert f"50 conversations; the data card is {out / 'card.md'}" in outcome.stderr
    assert len(list(read_rows(out))) == 50
    again = run("prepare", recipe, "--out", out, "--json")
    document = json.loads(again.stdout)
    assert document["rows"] == 50
    assert document["licences"] == {"MIT": 50}
    assert document["sources"]["lakes"]["out"] == 20
    assert "reading rivers" not in again.stderr


def test_settings_from_the_command_line(run: RunProgram, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    changes = ("--set", "prepare.rows=12", "--set", "prepare.sources.0.weight=1")
    outcome = run("prepare", recipe, "--out", out, *changes, "--json")
    counts = json.loads(outcome.stdout)["sources"]
    assert (counts["rivers"]["out"], counts["lakes"]["out"]) == (3, 9)
    other = run("prepare", recipe, "--out", out)
    assert other.exit_code == 1
    assert "holds finished work with settings.rows = 12, and this run has" in other.error


def test_files_without_a_recipe(
    run: RunProgram, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    files = ("data/rivers.jsonl", "data/lakes.txt")
    outcome = run("prepare", *files, "--licence", "CC0-1.0", "--out", tmp_path / "out", "--json")
    document = json.loads(outcome.stdout)
    assert document["licences"] == {"CC0-1.0": 50}
    assert list(document["sources"]) == ["rivers", "lakes"]


def test_two_files_of_one_name_are_two_sources(
    run: RunProgram, recipe: Path, tmp_path: Path
) -> None:
    lakes = recipe.parent / "data" / "lakes.txt"
    other = tmp_path / "lakes.txt"
    other.write_text("Where is it?\n")
    options = ("--licence", "MIT", "--out", tmp_path / "out", "--json")
    document = json.loads(run("prepare", lakes, other, *options).stdout)
    assert list(document["sources"]) == ["lakes", "lakes-2"]


def test_the_plan_writes_nothing(run: RunProgram, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = run("prepare", recipe, "--out", out, "--plan")
    assert "rivers (MIT): 30 rows in 1 file of" in outcome.stdout
    assert "output: about 50 rows" in outcome.stdout
    document = json.loads(run("prepare", recipe, "--out", out, "--plan", "--json").stdout)
    assert document["output_rows"] == 50
    assert [source["rows"] for source in document["sources"]] == [30, 20]
    assert document["needed_bytes"] >= document["output_bytes"] + document["index_bytes"]
    assert not out.exists()


def test_the_plan_estimates_large_files_from_their_beginning(
    run: RunProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_estimate, "_FILTERED_ROWS", 100)
    monkeypatch.setattr(prepare_estimate, "_READ_BYTES", 1 << 20)
    line = json.dumps({"prompt": "What is the {} of the river, and of the lake? " * 40})
    with (tmp_path / "large.jsonl").open("w") as file:
        file.writelines(line.replace("{}", str(number)) + "\n" for number in range(3000))
    words = ("prepare", tmp_path / "large.jsonl", "--licence", "MIT", "--out", tmp_path / "out")
    document = json.loads(run(*words, "--plan", "--json").stdout)
    (source,) = document["sources"]
    assert not source["is_exact"]
    assert 2800 < source["rows"] < 3200
    assert "about" in run(*words, "--plan").stdout


def test_a_disk_that_is_too_small(
    run: RunProgram, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    for words in (("--plan",), ()):
        outcome = run("prepare", recipe, "--out", tmp_path / "out", *words)
        assert outcome.exit_code == 1
        assert "not enough disk space for the rows and the index" in outcome.error
        assert "choose an output directory on a larger disk" in outcome.error
    assert not list((tmp_path / "out").glob("rows*"))


@pytest.mark.parametrize(
    ("old", "new", "exit_code", "message"),
    [
        ('name = "lakes"', 'nam = "lakes"', 2, "prepare.sources[1] has no setting `nam`; did you"),
        ("weight = 3", 'weight = "3"', 2, "prepare.sources[1].weight is '3'; it must be a number"),
        ('["MIT"]', '["Apache-2.0"]', 2, "source rivers has the licence 'MIT', and the recipe"),
        ("data/lakes.txt", "data/lake.txt", 1, "Did you mean"),
        ("data/lakes.txt", "ftp://lakes.txt", 2, "known are local paths"),
        ("[prepare]", "[prepare", 2, "is not valid TOML"),
    ],
)
def test_mistakes_in_the_recipe(
    run: RunProgram, recipe: Path, tmp_path: Path, old: str, new: str, exit_code: int, message: str
) -> None:
    assert old in RECIPE
    recipe.write_text(RECIPE.replace(old, new, 1))
    outcome = run("prepare", recipe, "--out", tmp_path / "out", "--json")
    assert message in outcome.error
    assert (outcome.exit_code, outcome.stdout) == (exit_code, "")
    assert not (tmp_path / "out").exists()


def test_wrong_use(run: RunProgram, recipe: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    lakes = recipe.parent / "data" / "lakes.txt"
    for words, message in [
        ((recipe, lakes, *out), "a recipe stands alone"),
        ((recipe, "--licence", "MIT", *out), "--licence is for files without a recipe"),
        ((lakes, *out), "--licence is missing"),
        ((lakes, "--licence", " ", *out), "source lakes declares no licence"),
        ((tmp_path / "none.toml", *out), "there is no recipe at"),
        ((recipe, *out, "--set", "prepare.rows"), "is not of the form name.of.setting=value"),
        ((recipe,), "Missing option '--out'"),
        (out, "Missing argument"),
    ]:
        outcome = run("prepare", *words)
        assert message in outcome.error
        assert outcome.exit_code == 2
    recipe.write_text('target = "tiny"\n')
    assert "has no [prepare] table" in run("prepare", recipe, *out).error


def test_no_torch_without_prompts_of_the_target(recipe: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from fledge.cli.main import main\n"
        "exit_code = main(sys.argv[1:])\n"
        "heavy = [name for name in ('torch', 'transformers') if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else exit_code)\n"
    )
    words = ["prepare", str(recipe), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def save_writing_target(directory: Path) -> Path:
    """A tiny target that writes lower-case words and ends its turns."""
    writing_engine().target._model.save_pretrained(directory)
    tiny_tokenizer(has_chat_template=True).save_pretrained(directory)
    return directory


def test_the_target_writes_prompts(run: RunProgram, tmp_path: Path) -> None:
    target_dir = save_writing_target(tmp_path / "target")
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        f'target = "{target_dir}"\n[[prepare.sources]]\nname = "own"\npath = "self"\n'
        'licence = "MIT"\n[[prepare.sources]]\nname = "more"\npath = "self"\nlicence = "MIT"\n'
        'self_prompts = { rows = 4, topics = ["rain"] }\n'
        '[[prepare.sources]]\nname = "next"\npath = "self"\nlicence = "MIT"\n'
        'self_prompts = { rows = 3, like = "own", shown = 2 }\n'
        "[prepare.self_prompts]\nrows = 6\nmax_tokens = 64\n"
        "[prepare.duplicates]\nnear = false\n"
    )
    plan = run("prepare", recipe, "--out", tmp_path / "out", "--plan")
    assert "and what the target needs to write prompts" in plan.stdout
    assert "own (MIT): 6 rows" in plan.stdout
    assert "more (MIT): 4 rows" in plan.stdout
    outcome = run("prepare", recipe, "--out", tmp_path / "out", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    counts = json.loads(outcome.stdout)["sources"]
    assert counts["own"]["out"] > 0
    assert counts["more"]["read"] == 4
    assert counts["next"]["read"] == 3
    rows = list(read_rows(tmp_path / "out"))
    assert {row.origin.file for row in rows} == {"self"}
    assert not (tmp_path / "out" / stage.WORK_NAME).exists()
