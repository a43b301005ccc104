"""Several recipes at once: real processes of the program, without a GPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fledge.testing import save_tiny_target

SCRIPT = Path(__file__).parents[3] / "tools" / "side_by_side.sh"
RECIPE = """
target = "{target}"
[run]
stages = ["prepare"]
[[prepare.sources]]
name = "own"
path = "{path}"
licence = "MIT"
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    asked = ({"prompt": f"What is {number} and one?"} for number in range(12))
    path.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    return path


def write(path: Path, rows: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(RECIPE.format(target="smollm2-135m-instruct", path=rows), encoding="utf-8")
    return path


def start(out: Path, *recipes: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [SCRIPT, out, *recipes],
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_recipes_run_beside_each_other_and_one_that_fails_is_named(
    tmp_path: Path, rows: Path
) -> None:
    good = [write(tmp_path / f"{name}.toml", str(rows)) for name in ("one", "two")]
    bad = write(tmp_path / "bad.toml", str(tmp_path / "missing.jsonl"))
    script = start(tmp_path / "out", *good, bad)
    said, errors = script.communicate(timeout=120)
    assert script.returncode == 1
    assert sorted(said.splitlines()) == ["one: done", "two: done"]
    assert errors.startswith("bad: exit ")
    assert "missing.jsonl" in errors
    for name in ("one", "two"):
        assert (tmp_path / "out" / name / "prepare" / "manifest.json").is_file()


def test_recipes_of_one_name_are_refused(tmp_path: Path, rows: Path) -> None:
    recipes = [write(tmp_path / folder / "same.toml", str(rows)) for folder in ("a", "b")]
    script = start(tmp_path / "out", *recipes)
    _, errors = script.communicate(timeout=30)
    assert script.returncode == 2
    assert "several recipes are called same" in errors


def test_an_interrupted_script_leaves_no_process(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target")
    recipe = tmp_path / "long.toml"
    text = RECIPE.format(target=target, path="self")
    recipe.write_text(text + "[prepare.self_prompts]\nrows = 1000000\n", encoding="utf-8")
    out = tmp_path / "out"
    script = start(out, recipe)
    log = out / "long.log"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (out / "long").exists():
        time.sleep(0.1)
    assert (out / "long").exists(), log.read_text()
    script.send_signal(signal.SIGTERM)
    _, errors = script.communicate(timeout=60)
    assert script.returncode == 1
    assert errors.startswith("long: exit 130: "), errors
    running = subprocess.run(["pgrep", "-f", str(recipe)], capture_output=True, check=False)
    assert running.stdout == b""
