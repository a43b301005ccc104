"""Tuned settings: the fastest tree, and the fastest chain for engines without trees."""

import json
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.contracts.settings import TreeSettings
from fledge.contracts.tuned_settings import TunedFor, TunedSettings, read_tuned


def row(depth: int, width: int, budget: int, speedup: float | None) -> dict[str, Any]:
    return {"depth": depth, "width": width, "budget": budget, "speedup": speedup}


ROWS = [row(6, 8, 40, 2.5), row(4, 1, 4, 1.9), row(7, 1, 7, 1.7), row(9, 1, 9, None)]


def test_the_fastest_tree_and_the_fastest_chain(tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text(json.dumps({"rows": ROWS}))
    expected = TunedSettings(tree=TreeSettings(depth=6, width=8, budget=40), chain_depth=4)
    assert read_tuned(tmp_path) == read_tuned(tmp_path / "tune.json") == expected
    assert expected.chain == 4
    (tmp_path / "tune.json").write_text(json.dumps({"rows": ROWS[:1], "best": ROWS[1]}))
    tuned = read_tuned(tmp_path)
    assert (tuned.tree.depth, tuned.chain_depth, tuned.chain) == (4, None, 4)


def test_what_a_tuning_says_beside_the_tree(tmp_path: Path) -> None:
    best = {**ROWS[0], "controller": "adaptive"}
    document = {
        "target": "t", "head": "h", "rows": ROWS, "best": best, "chain": ROWS[2],
        "made_for": {"weights": "w", "head": "f"},
    }  # fmt: skip
    (tmp_path / "tune.json").write_text(json.dumps(document))
    tuned = read_tuned(tmp_path)
    assert (tuned.controller, tuned.chain) == ("adaptive", 7)
    assert tuned.made_for == TunedFor(target="t", head="h", weights="w", fingerprint="f")
    document["best"] = {**best, "controller": "clever"}
    (tmp_path / "tune.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="controller is 'clever'; it must be one of"):
        read_tuned(tmp_path)


@pytest.mark.parametrize("text", ["{nope", "[]", "{}", '{"rows": []}', '{"rows": [{"depth": 3}]}'])
def test_files_that_hold_something_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "tune.json").write_text(text)
    with pytest.raises(ArtifactError, match="tune.json does not hold what a tuning measured"):
        read_tuned(tmp_path)


def test_no_file_and_impossible_chains(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there are no tuned settings at .*nowhere: No such"):
        read_tuned(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="chain_depth is 65; it must be between 1 and 64"):
        TunedSettings(tree=TreeSettings(), chain_depth=65)
