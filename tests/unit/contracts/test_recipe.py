"""Recipes and the settings of the data stages: what is accepted, what is refused and how."""

import dataclasses
import typing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.data_settings import (
    DecontaminateSettings,
    DuplicateSettings,
    PrepareSettings,
    PrivacySettings,
    SelfSettings,
    SourceSettings,
    decisive_self,
)
from fledge.contracts.errors import ConfigError
from fledge.contracts.recipe import DEFAULT_TARGET, Recipe, load_recipe
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.contracts.select_settings import SelectSettings
from fledge.contracts.tokenize_settings import TokenizeSettings
from fledge.contracts.toml_settings import read_settings, to_plain
from fledge.contracts.tune_settings import TuneSettings

ROOT = Path(__file__).parents[3]
RECIPE = """
target = "tiny"

[prepare]
licences = ["MIT", "Apache-2.0"]
rows = 100

[[prepare.sources]]
name = "sums"
path = "sums.jsonl"
licence = "MIT"
weight = 2

[[prepare.sources]]
name = "tools"
path = ["a.json", "b.json"]
licence = "Apache-2.0"
max_rows = 50

[prepare.privacy]
default = "replace"
actions = { email = "drop" }

[regenerate]
temperatures = [0, 1]
"""


def source(**changes: Any) -> SourceSettings:
    return SourceSettings(**{"name": "a", "path": ("a.jsonl",), "licence": "MIT", **changes})


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def test_a_recipe_is_read(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.target == "tiny"
    assert recipe.prepare is not None
    assert recipe.prepare.rows == 100
    assert [one.name for one in recipe.prepare.sources] == ["sums", "tools"]
    assert recipe.prepare.sources[0].path == ("sums.jsonl",)
    assert recipe.prepare.sources[1].path == ("a.json", "b.json")
    assert recipe.prepare.privacy.actions == {"email": "drop"}
    assert recipe.regenerate.temperatures == (0.0, 1.0)
    assert recipe.tokenize == TokenizeSettings()


def test_assignments_go_over_the_file(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file, ["target=other", "prepare.rows=7", "prepare.sources.1.max_rows=9"]
    )
    assert recipe.target == "other"
    assert recipe.prepare is not None
    assert recipe.prepare.rows == 7
    assert recipe.prepare.sources[1].max_rows == 9


def test_without_a_file_all_is_default() -> None:
    assert load_recipe(None) == Recipe()
    assert load_recipe(None).target == DEFAULT_TARGET


def test_a_saved_recipe_reads_back_to_the_same(recipe_file: Path) -> None:
    for recipe in (load_recipe(recipe_file), Recipe()):
        assert read_settings(Recipe, to_plain(recipe), where="") == recipe


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rows = 100", "row = 100", "prepare has no setting `row`; did you mean `rows`?"),
        ("[regenerate]", "[regenrate]", "no setting `regenrate`; did you mean `regenerate`?"),
        ("rows = 100", 'rows = "many"', "prepare.rows is 'many'; it must be a whole number."),
        ("rows = 100", "rows = -1", "in prepare: rows is -1; it must be at least 0."),
        (
            'licences = ["MIT", "Apache-2.0"]',
            'licences = ["MIT"]',
            "source tools has the licence 'Apache-2.0', and the recipe allows MIT; leave the "
            "source out or allow it.",
        ),
        ('name = "tools"', 'name = "sums"', "two sources have the name 'sums'; names must differ."),
        (
            '{ email = "drop" }',
            '{ email = "shred" }',
            "prepare.privacy.actions.email is 'shred'; it must be one of 'replace', 'drop', 'keep'",
        ),
        (
            "weight = 2",
            "weight = -2",
            "weight of source sums is -2.0; it must be between 0 and",
        ),
        ("weight = 2", "weight = nan", "weight of source sums is nan; it must be between"),
        ("weight = 2", "weight = inf", "weight of source sums is inf; it must be between"),
        ('path = "sums.jsonl"', "", "prepare.sources[0] lacks `path`."),
    ],
)
def test_mistakes_in_a_recipe(recipe_file: Path, old: str, new: str, message: str) -> None:
    assert old in RECIPE
    recipe_file.write_text(RECIPE.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file)
    assert message in str(caught.value)


def test_a_recipe_without_sources(recipe_file: Path) -> None:
    recipe_file.write_text("[prepare]\nrows = 3\n")
    with pytest.raises(ConfigError, match="prepare lacks `sources`"):
        load_recipe(recipe_file)
    recipe_file.write_text("[prepare]\nsources = []\n")
    with pytest.raises(ConfigError, match="in prepare: there are no sources; name at least one"):
        load_recipe(recipe_file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": " "}, "a source is named ' '; use a name without slashes."),
        ({"name": "a/b"}, "a source is named 'a/b'; use a name without slashes."),
        ({"path": ()}, "source a has no path, or an empty one."),
        ({"path": ("x", "")}, "source a has no path, or an empty one."),
        ({"path": ("self", "x")}, "source a mixes 'self' with other paths; make two sources"),
        ({"licence": " "}, "source a declares no licence; write what its owner states."),
        ({"max_rows": -1}, "max_rows of source a is -1; it must be at least 0."),
        (
            {"self_prompts": {"rows": 5}},
            "source a has self_prompts and the path a.jsonl, where nobody writes any; leave them",
        ),
        (
            {"path": ("self",), "self_prompts": {"row": 5}},
            "a.self_prompts has no setting `row`; did you mean `rows`?",
        ),
        (
            {"path": ("self",), "self_prompts": {"topics": [5]}},
            "a.self_prompts.topics[0] is 5; it must be a text.",
        ),
        (
            {"path": ("self",), "self_prompts": {"rows": 0}},
            "in a.self_prompts: rows is 0; it must be at least 1.",
        ),
        (
            {"path": ("self",), "self_prompts": {"shown": 0}},
            "in a.self_prompts: shown is 0; it must be between 1 and 32.",
        ),
        (
            {"path": ("self",), "self_prompts": {"shown": 33}},
            "in a.self_prompts: shown is 33; it must be between 1 and 32.",
        ),
    ],
)
def test_mistakes_in_a_source(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        source(**changes)
    assert str(caught.value).startswith(message)


def test_a_blend_needs_a_source_with_weight() -> None:
    PrepareSettings(sources=(source(weight=0.0),))
    with pytest.raises(ConfigError, match="every source has weight 0"):
        PrepareSettings(sources=(source(weight=0.0),), rows=5)


def test_a_source_changes_single_settings_of_self_prompts() -> None:
    common = SelfSettings(rows=7, max_tokens=99, languages=("English",))
    assert source(path=("self",)).self_settings(common) == common
    own = source(path=("self",), self_prompts={"rows": 5, "temperature": 1, "topics": ["x", "y"]})
    assert own.self_settings(common) == SelfSettings(
        rows=5, temperature=1.0, max_tokens=99, topics=("x", "y"), languages=("English",)
    )
    built_in = source(path=("self",), self_prompts={"languages": []})
    assert built_in.self_settings(common) == SelfSettings(rows=7, max_tokens=99)
    recipe = Recipe(prepare=PrepareSettings(sources=(own,)))
    assert read_settings(Recipe, to_plain(recipe), where="") == recipe


@pytest.mark.parametrize(
    ("like", "before"), [("c", "a"), ("b", "a"), ("nobody", "a"), ("a", "none")]
)
def test_a_source_is_like_one_before_it(like: str, before: str) -> None:
    own = partial(source, path=("self",), self_prompts={"like": like})
    sources = (source(), own(name="b"), source(name="c"))
    with pytest.raises(ConfigError) as caught:
        PrepareSettings(sources=sources if before == "a" else sources[1:])
    assert str(caught.value) == (
        f"source b is to be like {like!r}, which is not among the sources before it ({before}); "
        "name one of those, or move that one up."
    )
    PrepareSettings(sources=(source(name=like), own(name="own")))


def test_one_self_source_may_be_what_the_others_are_like() -> None:
    common = SelfSettings(like="a")
    own = source(name="b", path=("self",))
    PrepareSettings(sources=(source(), own), self_prompts=common)
    with pytest.raises(ConfigError, match="source a is to be like 'a', .* before it .none."):
        PrepareSettings(sources=(source(path=("self",)), own), self_prompts=common)
    first = source(path=("self",), self_prompts={"like": ""})
    PrepareSettings(sources=(first, own), self_prompts=common)


def test_plans_without_examples_are_those_from_before_there_were_any() -> None:
    before = {
        *("rows", "temperature", "top_p", "max_tokens"),
        *("system_prompts", "topics", "languages"),
    }
    assert set(decisive_self(SelfSettings(rows=7))) == before
    assert set(decisive_self(SelfSettings(like="a"))) == {*before, "like", "shown"}
    # A source may name what it is like, and leave it to all how much of that is shown.
    assert set(decisive_self(SelfSettings(shown=8))) == {*before, "shown"}


def test_only_self_is_self() -> None:
    assert source(path=("self",)).is_self
    assert not source(path=("self.jsonl",)).is_self


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (PrivacySettings, {"names_min_score": 1.5}, "names_min_score is 1.5; it must be between"),
        (DuplicateSettings, {"threshold": 0.1}, "threshold is 0.1; it must be between 0.3 and 1.0"),
        (DecontaminateSettings, {"ngram": 2}, "ngram is 2; it must be between 3 and 100"),
        (SelfSettings, {"rows": 0}, "rows is 0; it must be at least 1"),
        (SelfSettings, {"temperature": 0.0}, "temperature is 0.0; it must be between 0.1 and 5.0"),
        (SelfSettings, {"max_tokens": 3}, "max_tokens is 3; it must be at least 4"),
        (PrepareSettings, {"max_turn_chars": 9}, "max_turn_chars is 9; it must be at least 100"),
        (RegenerateSettings, {"temperatures": ()}, "temperatures is empty; give at least one"),
        (RegenerateSettings, {"temperatures": (6.0,)}, "a temperature is 6.0; it must be between"),
        (
            RegenerateSettings,
            {"source_temperatures": {"math": ()}},
            "source_temperatures.math is empty; give at least one",
        ),
        (
            RegenerateSettings,
            {"source_temperatures": {"math": (0.0, 1.0, 0.0)}},
            "source_temperatures.math has 0 twice: the target would say the same again",
        ),
        (RegenerateSettings, {"top_p": 0.0}, "top_p is 0.0; it must be between 0.01 and 1"),
        (RegenerateSettings, {"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be"),
        (SelectSettings, {"repetition_penalty": -1.0}, "repetition_penalty is -1.0; it must be"),
        (TuneSettings, {"repetition_penalty": 101.0}, "repetition_penalty is 101.0; it must be"),
        (BenchSettings, {"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be"),
        (RegenerateSettings, {"concurrency": 0}, "concurrency is 0; it must be at least 1"),
        (RegenerateSettings, {"retries": -1}, "retries is -1; it must be at least 0"),
        (RegenerateSettings, {"timeout_s": 0.5}, "timeout_s is 0.5; it must be at least 1"),
        (TokenizeSettings, {"shard_tokens": 1}, "shard_tokens is 1; it must be at least 8"),
        (
            TokenizeSettings,
            {"vocabulary_weights": {"math": -1}},
            "vocabulary_weights.math is -1; it must be between 0 and 1000",
        ),
    ],
)
def test_values_out_of_range(cls: type, changes: dict[str, Any], message: str) -> None:
    given = {"sources": (source(),)} if cls is PrepareSettings else {}
    with pytest.raises(ConfigError) as caught:
        cls(**given, **changes)
    assert str(caught.value).startswith(message)


def settings_of(cls: Any, where: str) -> list[str]:
    """Names of all settings below a table, its own tables included."""
    hints = typing.get_type_hints(cls)
    found = []
    for one in dataclasses.fields(cls):
        inner = next(
            (
                kind
                for kind in (hints[one.name], *typing.get_args(hints[one.name]))
                if dataclasses.is_dataclass(kind)
            ),
            None,
        )
        found += [f"{where}{one.name}"] if inner is None else []
        found += settings_of(inner, f"{where}{one.name}.") if inner is not None else []
    return found


def test_the_reference_names_every_setting() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    sections = page.split("\n#")
    for name in settings_of(Recipe, ""):
        *tables, last = name.split(".")
        heading = ".".join(tables)
        texts = [one for one in sections if f"[{heading}]" in one.splitlines()[0]] or [page]
        assert any(f"`{last}`" in text for text in texts), f"docs/recipes.md lacks {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.name)
def test_recipes_of_the_repository_are_valid(path: Path) -> None:
    assert load_recipe(path).prepare is not None


def test_the_example_of_the_reference_is_a_recipe(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    example = tmp_path / "example.toml"
    example.write_text(page.split("```toml\n")[1].split("```")[0], encoding="utf-8")
    recipe = load_recipe(example)
    assert recipe.prepare is not None
    assert recipe.prepare.sources[1].is_self


def test_files_of_prompts_are_found_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"prompt": "hello"}\n')
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[select]\nsuites = ["own.jsonl", "builtin"]\n[tune]\nsuites = ["gsm8k"]\n'
        '[bench]\nprompts = "own.jsonl"\n'
    )
    read = load_recipe(recipe)
    assert read.bench.prompts == str(tmp_path / "own.jsonl")
    assert load_recipe(recipe, ["bench.prompts=builtin"]).bench.prompts == "builtin"
    assert read.select.suites == (str(tmp_path / "own.jsonl"), "builtin")
    assert read.tune.suites == ("gsm8k",)
