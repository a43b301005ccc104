"""`fledge demo` with a head, and the default head of the other verbs."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fledge.cli import demo_contest
from fledge.cli.demo_page import WIDTH, page_text
from fledge.cli.demo_prompts import PROMPTS
from fledge.cli.main import main
from fledge.contracts.recipe import DEFAULT_TARGET
from fledge.models.shipped_heads import find_shipped_head
from fledge.testing import save_tiny_target
from tests.e2e.conftest import RunProgram
from tests.shipped_pairs import tuning

FIGURES = {
    "outputs_identical",
    "baseline_tokens_per_s",
    "speculative_tokens_per_s",
    "speedup",
    "accept_length",
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("Name two rivers.\n\n  What is rain?  \n", encoding="utf-8")
    return file


def demo(target: Path, prompts: Path, *more: object) -> list[object]:
    return ["demo", "--target", target, "--prompts", prompts, "--max-tokens", 9, *more]


@pytest.fixture(scope="module")
def document(heads: Path, target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What --json prints, once for several tests."""
    file = tmp_path_factory.mktemp("asked") / "prompts.txt"
    file.write_text("Name two rivers.\nWhat is rain?\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        stdout = io.StringIO()
        patch.setattr(sys, "stdout", stdout)
        patch.setenv("FLEDGE_CACHE", str(file.parent / "cache"))
        assert main([str(word) for word in demo(target_dir, file, "--json")]) == 0
        return json.loads(stdout.getvalue())


def test_the_document(document: dict[str, Any], heads: Path, target_dir: Path) -> None:
    assert set(document) >= {*FIGURES, "prompts", "target", "head", "tree", "provenance"}
    assert document["outputs_identical"] is True
    assert document["head"] == str(heads / target_dir.name)
    assert document["tree"] == {"depth": 3, "width": 2, "budget": 5}
    assert document["controller"] == "fixed"
    assert document["order"] == ["without", "with", "with", "without"]
    assert document["accept_length"] >= 1
    ratio = document["speculative_tokens_per_s"] / document["baseline_tokens_per_s"]
    assert document["speedup"] == pytest.approx(ratio, rel=1e-2)
    assert [entry["prompt"] for entry in document["prompts"]] == [
        "Name two rivers.",
        "What is rain?",
    ]
    for entry in document["prompts"]:
        assert set(entry) >= {*FIGURES, "prompt", "text", "num_tokens", "seconds"}
        assert entry["first_different_token"] is None
        assert len(entry["seconds"]) == 4
        assert 0 < entry["num_tokens"] <= 9


def test_the_page_is_narrow_and_says_everything(document: dict[str, Any]) -> None:
    lines = page_text(document).splitlines()
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    for words in (
        "1. Name two rivers.",
        "2. What is rain?",
        "without a head",
        "with the head",
        "Same text, token for token: 2 of 2 prompts.",
        f"{document['speedup']:.2f} times as fast",
        f"{document['accept_length']:.2f} tokens a pass",
    ):
        assert words in text
    assert "\033" not in text


def test_long_prompts_and_answers_are_wrapped(document: dict[str, Any]) -> None:
    entry = document["prompts"][0]
    odd = {
        **entry,
        "prompt": "why " * 60,
        "text": "wörter\n\tmit 漢字 " * 20 + "x" * 90 + "\033[2J",
    }
    page = page_text({**document, "prompts": [odd]})
    assert "\033" not in page
    assert "漢字" in page
    assert max(len(line) for line in page.splitlines()) <= WIDTH


def test_a_pipe_gets_the_page(
    run: RunProgram, heads: Path, target_dir: Path, prompts: Path
) -> None:
    shown = run(*demo(target_dir, prompts))
    assert shown.exit_code == 0, shown.stderr
    assert "Same text, token for token: 2 of 2 prompts." in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= WIDTH
    assert "\033" not in shown.stdout
    assert (
        f"head: shipped for {target_dir.name}; trees of depth 3, width 2, 5 nodes" in shown.stderr
    )
    assert "prompt 2 of 2: done in" in shown.stderr
    after = shown.stderr.split("Try next:\n")[1]
    assert [line.split()[-1] for line in after.splitlines()][0] == "chat"
    assert len(after.splitlines()) == 3


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_both_answers_grow(
    heads: Path, target_dir: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = _Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("fledge.cli.demo_display._REFRESH_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    assert main([str(word) for word in demo(target_dir, prompts)]) == 0
    shown = screen.getvalue()
    assert "answering without the head ..." in shown
    assert "answering with the head, again, in the other order" in shown
    assert "Same text, token for token: 2 of 2 prompts." in shown


def test_a_difference_is_an_error_in_float32(
    run: RunProgram,
    heads: Path,
    target_dir: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo_contest.Round, "parting", property(lambda one: 4))
    outcome = run(*demo(target_dir, prompts, "--json"))
    assert outcome.exit_code == 1
    assert "the answers without and with the head differ (prompt 1 from token 5" in outcome.error
    assert json.loads(outcome.stdout)["outputs_identical"] is False
    shorter = run(*demo(target_dir, prompts, "--dtype", "bfloat16"))
    assert shorter.exit_code == 0
    assert "DIFFERENT from token 5 on" in shorter.stdout
    assert "In bfloat16 a pass over several tokens rounds differently" in shorter.stderr


def test_where_answers_part() -> None:
    def parting(*answers: list[int]) -> int | None:
        made = tuple(_completion(ids) for ids in answers)
        return demo_contest.Round("?", made).parting

    assert parting([1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]) is None
    assert parting([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 3]) == 2
    assert parting([1, 2, 3], [1, 2], [1, 2, 3], [1, 2, 3]) == 2
    assert parting([1, 2, 3], [1, 2, 3], [1, 2, 3], [9, 2, 3]) == 0


def _one_prompt(place: Path) -> Path:
    file = place / "one.txt"
    file.write_text("rain", encoding="utf-8")
    return file


def _completion(ids: list[int]) -> Any:
    class Answer:
        token_ids = tuple(ids)

    return Answer()


def test_prompts_that_cannot_be_read(run: RunProgram, target_dir: Path, tmp_path: Path) -> None:
    assert len(set(PROMPTS)) == 6
    missing = run(*demo(target_dir, tmp_path / "none.txt"))
    assert "none.txt cannot be read" in missing.error
    (tmp_path / "empty.txt").write_text("\n \n")
    assert (
        "holds no prompt; write one a line" in run(*demo(target_dir, tmp_path / "empty.txt")).error
    )


def test_an_impossible_length_is_refused_before_loading(run: RunProgram, target_dir: Path) -> None:
    refused = run("demo", "--target", str(target_dir), "--max-tokens", "0")
    assert "max_tokens is 0; it must be at least 1" in refused.error
    assert "loading" not in refused.stderr


def test_the_other_verbs_take_the_default_head(
    run: RunProgram, heads: Path, target_dir: Path
) -> None:
    asked = ("--target", target_dir, "--prompt", "rain", "--max-tokens", 6, "--json")
    default, none = run("generate", *asked), run("generate", *asked, "--head", "none")
    with_head, without = json.loads(default.stdout), json.loads(none.stdout)
    assert with_head["token_ids"] == without["token_ids"]
    assert with_head["head"] == str(heads / target_dir.name)
    assert with_head["offered_at_depth"]
    assert without["head"] is None
    assert "head: none, one token at a time" in none.stderr
    chat = run("chat", "--target", target_dir, "--max-tokens", 4, stdin="rain\n")
    assert chat.exit_code == 0
    assert "head: shipped for" in chat.stderr
    typed = run("generate", *asked, "--depth", 2)
    assert "trees of depth 2, width 8, 40 nodes, adaptive" in typed.stderr


def test_a_head_of_another_target_is_not_taken(
    run: RunProgram, heads: Path, target_dir: Path, tmp_path: Path
) -> None:
    other = save_tiny_target(tmp_path / target_dir.name, seed=1)
    outcome = run(*demo(other, _one_prompt(tmp_path), "--json"))
    assert json.loads(outcome.stdout)["head"] is None


def test_a_tuning_for_another_head_is_refused(
    run: RunProgram, heads: Path, target_dir: Path, tmp_path: Path
) -> None:
    document = tuning("another head", "other weights")
    (tmp_path / "tune.json").write_text(json.dumps(document))
    outcome = run("demo", "--target", target_dir, "--tuned", tmp_path)
    assert "tuned for the head /somewhere/" in outcome.error


def test_doctor_names_the_shipped_head(run: RunProgram, heads: Path, target_dir: Path) -> None:
    facts = json.loads(run("doctor", "--json").stdout)["shipped_heads"]
    assert facts["error"] is None
    assert [head["target"] for head in facts["heads"]] == [target_dir.name]
    assert f"{target_dir.name}, " in run("doctor").stdout
    manifest = heads / target_dir.name / "manifest.json"
    kept = manifest.read_bytes()
    try:
        manifest.write_bytes(b"{")
        damaged = run("doctor")
        assert "comes with fledge is damaged" in damaged.stdout
        assert damaged.exit_code == 0
    finally:
        manifest.write_bytes(kept)


@pytest.mark.slow
def test_the_real_demo(run: RunProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default target with the head that comes with it, fetched where it is not in the cache."""
    if find_shipped_head(DEFAULT_TARGET) is None:
        pytest.skip(f"no head for {DEFAULT_TARGET} comes with this fledge")
    monkeypatch.delenv("FLEDGE_CACHE")
    document = json.loads(run("demo", "--device", "cpu", "--json").stdout)
    assert document["outputs_identical"]
    assert document["accept_length"] > 1
