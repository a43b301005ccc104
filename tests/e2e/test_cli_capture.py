"""`fledge capture` as a user runs it."""

import json
from pathlib import Path

import pytest

from fledge.features.feature_store import FeatureStore
from tests.e2e.conftest import RunProgram
from tests.unit.features.capture_support import random_samples, save_corpus

LENGTHS = (30, 2, 50, 9, 120, 70, 3, 44)


@pytest.fixture(scope="module")
def corpus(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpora") / "corpus"
    return save_corpus(directory, target_dir, random_samples(LENGTHS))


def test_features_are_made_and_described(
    run: RunProgram, corpus: Path, target_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "features"
    words = ("capture", corpus, "--out", out, "--target", target_dir)
    done = run(*words)
    assert (done.exit_code, done.stdout) == (0, f"{out}\n")
    assert "running in float32 on cpu" in done.stderr
    assert "capturing: done" in done.stderr
    assert "7 samples, 323 tokens: layers 2, 2, 1 as q5, 107 labels as hidden" in done.stderr
    assert "left out 1 sample without a label" in done.stderr
    store = FeatureStore.open(out)
    again = run(*words, "--json")
    assert "loading" not in again.stderr
    document = json.loads(again.stdout)
    assert document["fingerprint"] == store.manifest.fingerprint
    assert (document["target"], document["dtype"]) == ("tiny", "float32")
    assert (document["taps"], document["features"]) == ([2, 2, 1], "q5")
    assert (document["samples"], document["samples_without_labels"]) == (7, 1)
    assert document["shards"] == 1
    assert document["stored_bytes"] == sum(e["bytes"] for e in store.manifest.files.values())


def test_plan_loads_and_writes_nothing(
    run: RunProgram, corpus: Path, target_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "features"
    words = ("capture", corpus, "--out", out, "--target", target_dir, "--plan")
    shown = run(*words)
    assert shown.exit_code == 0
    assert "corpus: 8 samples, 328 tokens" in shown.stdout
    assert f"into: {out} (" in shown.stdout
    assert "time: about" in shown.stdout
    assert "loading" not in shown.stderr
    document = json.loads(run(*words, "--json", "--set", "capture.layers=auto").stdout)
    assert document["facts"]["label_rows"] == 107
    assert {"total_bytes", "needed_bytes", "device_bytes", "host_bytes"} < document.keys()
    assert document["seconds"] > 0
    assert document["free_bytes"] > document["needed_bytes"]
    assert not out.exists()


def test_settings_and_a_second_run_with_others(
    run: RunProgram, corpus: Path, target_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "features"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'target = "{target_dir}"\n[capture]\nlayers = [0, 4]\nfeatures = "exact"\n')
    words = ("capture", corpus, "--out", out, "--recipe", recipe)
    assert run(*words, "--set", "capture.target=topk", "--dtype", "bfloat16").exit_code == 0
    layout = FeatureStore.open(out).layout
    assert (layout.taps, layout.features, layout.target) == ((0, 4), "exact", "topk")
    assert layout.dtype == "bfloat16"
    error = run(*words, "--set", "capture.target=topk").error
    assert "features.dtype = 'bfloat16'" in error
    assert "features.dtype = 'float32'" in error


def test_wrong_input_costs_nothing(run: RunProgram, target_dir: Path, tmp_path: Path) -> None:
    missing = run("capture", tmp_path / "no", "--out", tmp_path / "out", "--target", target_dir)
    assert f"there is no directory {tmp_path / 'no'}" in missing.error
    assert "loading" not in missing.stderr
    assert not (tmp_path / "out").exists()
