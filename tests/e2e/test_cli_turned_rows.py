"""The verbs that take a head, with one whose output rows are the target's, turned by a matrix."""

import json
from pathlib import Path

import pytest

from fledge.models.head_files import load_head
from fledge.testing import save_tiny_target
from tests.e2e.conftest import RunProgram
from tests.shipped_pairs import save_random_head, ship, shipped_from
from tests.unit.models.head_on_disk import assert_same

CHAIN = ("--controller", "fixed", "--depth", 2, "--width", 1, "--budget", 2)
PLACE = ("--dtype", "float32", "--device", "cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Deep enough for the layers that every engine reads by default."""
    return save_tiny_target(tmp_path_factory.mktemp("targets") / "deep", num_hidden_layers=8)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return save_random_head(target, tmp_path_factory.mktemp("heads") / "turned", turned_rows=True)


def test_generate_and_select(run: RunProgram, tmp_path: Path, target: Path, head: Path) -> None:
    words = ("generate", "--target", target, "--prompt", "Hi", "--max-tokens", 6, *PLACE, "--json")
    plain, drafted = (
        json.loads(run(*words, "--head", one, *CHAIN).stdout) for one in ("none", head)
    )
    assert drafted["text"] == plain["text"]
    assert drafted["accept_length"] >= 1.0

    suite, out = tmp_path / "own.jsonl", tmp_path / "out"
    suite.write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')
    words = ("select", head, "--target", target, "--out", out, "--suite", suite, *PLACE)
    done = run(*words, "--max-tokens", 4, "--repeats", 1, *CHAIN, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["best"] == str(head)


@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators", "eagle", "gguf", "openvino"])
def test_other_engines_get_whole_rows(
    run: RunProgram, tmp_path: Path, target: Path, head: Path, to: str
) -> None:
    out = tmp_path / "out"
    words = ("export", head, "--to", to, "--out", out)
    refused = run(*words)
    assert refused.exit_code == 2
    assert "turned_rows" in refused.error
    assert "--target" in refused.error
    done = run(*words, "--target", target, "--verify")
    assert done.exit_code == 0, done.stderr
    assert "verified · draft logits of 6 tokens over 3 steps: equal" in done.stderr
    if to != "gguf":
        assert not load_head(out).config.turned_rows


def test_an_import_keeps_the_matrix(
    run: RunProgram, tmp_path: Path, target: Path, head: Path
) -> None:
    for number, more in enumerate(((), ("--target", target))):
        done = run("import", head, "--out", tmp_path / f"{number}", *more)
        assert done.exit_code == 0, done.stderr
        assert_same(load_head(tmp_path / f"{number}"), load_head(head))
        assert load_head(tmp_path / f"{number}").config.turned_rows


def test_one_that_comes_with_fledge(
    run: RunProgram, tmp_path: Path, target: Path, head: Path
) -> None:
    shipped = ship(head, target, tmp_path / "heads")
    with shipped_from(tmp_path / "heads"):
        listed = json.loads(run("doctor", "--json").stdout)["shipped_heads"]
        assert listed["error"] is None
        assert [one["directory"] for one in listed["heads"]] == [str(shipped.directory)]
        words = ("--target", target, "--prompt", "Hi", "--max-tokens", 4, *PLACE)
        done = run("generate", *words, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["accept_length"] >= 1.0
    assert "head:" in done.stderr
