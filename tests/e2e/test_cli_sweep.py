"""`fledge sweep` as a user runs it: from features to a table, with what it refuses."""

import json
from pathlib import Path

import pytest

from fledge.cli.main import main
from fledge.models.head_files import load_head
from tests.e2e.conftest import RunProgram

RECIPE = """
target = "TARGET"

[capture]
layers = [1, 2, 3]

[train]
max_steps = 3
batch_tokens = 512
micro_tokens = 256

[train.loss]
steps = 2

[train.held_out]
share = 0.05
every = 3
decode_prompts = 2
decode_tokens = 12

[sweep.space]
"train.optimizer.learning_rate" = [1e-2, 1e-4]
"""


@pytest.fixture(scope="module")
def recipe(language_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "recipe.toml"
    path.write_text(RECIPE.replace("TARGET", str(language_target)))
    return path


@pytest.fixture(scope="module")
def features(recipe: Path, language_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("features") / "language"
    words = ["capture", language_corpus, "--recipe", recipe, "--out", out, "--device", "cpu"]
    assert main([str(word) for word in words]) == 0
    return out


def test_a_sweep_over_features(
    run: RunProgram, recipe: Path, features: Path, tmp_path: Path
) -> None:
    out = tmp_path / "sweep"
    words = ("sweep", recipe, "--features", features, "--out", out, "--device", "cpu")
    planned = run(*words, "--plan", "--json")
    assert planned.exit_code == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert (plan["trials"], plan["steps"]) == (2, 6)
    shown = run(*words, "--plan").stdout
    assert shown.startswith("makes: 2 trials, 6 steps, ")
    assert "held-out measurements not counted" in shown
    assert not out.exists(), "a plan writes nothing"

    done = run(*words)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{out}\n"
    assert "trial 1 of 2: learning_rate=0.01" in done.stderr
    assert "rank  trial  learning_rate  accept length" in done.stderr
    best = json.loads((out / "sweep.json").read_text())["trials"][0]
    assert f"best: trial {best['trial']}, a head in {out / best['run']}" in done.stderr
    assert load_head(out / best["run"]).config.taps == (1, 2, 3)

    again = run(*words, "--json")
    document = json.loads(again.stdout)
    assert document["trials"][0] == best
    assert document["knobs"] == ["train.optimizer.learning_rate"]
    assert {"out", "target", "fingerprint", "method"} <= set(document)


def test_what_is_refused(
    run: RunProgram,
    recipe: Path,
    language_corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = ("--out", tmp_path / "out")
    plain = tmp_path / "plain.toml"
    plain.write_text('target = "x"\n')
    assert "plain.toml has no [sweep] table" in run("sweep", plain, *out).error
    assert "give either --features" in run("sweep", recipe, *out).error
    corpus = ("--corpus", language_corpus)
    wrong = run("sweep", recipe, *corpus, *out, "--set", "sweep.space.train.lr=[1]")
    assert "varies train.lr, and there is no such setting" in wrong.error
    assert wrong.exit_code == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun started 2 processes" in run("sweep", recipe, *corpus, *out).error
    assert not (tmp_path / "out").exists()
