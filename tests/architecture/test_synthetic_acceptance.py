"""Drafts that are right by chance are for measuring: nothing that answers can switch them on."""

import re
from dataclasses import fields
from pathlib import Path

from fledge.contracts.settings import EngineSettings

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fledge"
NAMES = re.compile(r"synthetic|measured_with", re.IGNORECASE)
MAY_SAY_IT = {"ops/synthetic_walk.py", "engine/engine.py"}


def test_only_the_rule_and_the_engine_know_of_it() -> None:
    """No command, setting, recipe or request names it: `Engine` takes it from Python alone."""
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if NAMES.search(path.read_text(encoding="utf-8"))
    }
    assert found == MAY_SAY_IT


def test_no_setting_and_no_recipe_has_it() -> None:
    assert [one.name for one in fields(EngineSettings) if NAMES.search(one.name)] == []
    recipes = [*(ROOT / "recipes").rglob("*.toml"), *SOURCE.rglob("*.toml")]
    assert recipes
    for recipe in recipes:
        assert not NAMES.search(recipe.read_text(encoding="utf-8")), recipe


def test_loading_by_name_does_not_take_it() -> None:
    """`serve`, `generate` and all other commands make their engines by `Engine.load`."""
    text = (SOURCE / "engine" / "engine.py").read_text(encoding="utf-8")
    start = text.index("def load(")
    body = text[start : text.index("\n    def ", start + 1)]
    assert not NAMES.search(body)
