"""`fledge tokenize` as a user runs it."""

import json
from pathlib import Path

import pytest

from fledge.store.corpus import Corpus
from fledge.store.rows import read_rows
from tests.e2e.conftest import RunProgram
from tests.unit.data.tokenize_support import answer, many_rows, row, save_target, write_source

UNCLEAR = row(
    1,
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy"},
    ],
    answer(1),
    source="sums",
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("targets") / "tiny-chat")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("answers") / "in", many_rows(30))


def test_a_corpus_is_made_and_described(
    run: RunProgram, answers: Path, target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "corpus"
    done = run("tokenize", answers, "--out", out, "--target", target)
    assert (done.exit_code, done.stdout) == (0, f"{out}\n")
    assert "30 of 30 rows gave 30 samples" in done.stderr
    assert "a: 15 samples, " in done.stderr
    assert "draft vocabulary of 512 tokens: covers 100.00% of what was said" in done.stderr
    assert len(Corpus.open(out)) == 30
    again = run("tokenize", answers, "--out", out, "--target", target, "--json")
    document = json.loads(again.stdout)
    assert document["target"] == "tiny-chat"
    assert document["rows"]["used"] == document["samples"] == 30
    assert document["fingerprint"] == Corpus.open(out).manifest.fingerprint
    assert set(document) > {"reasons", "tokens", "loss_share", "lengths", "packing", "vocabulary"}


def test_plan_writes_nothing(run: RunProgram, answers: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus"
    words = ("tokenize", answers, "--out", out, "--target", target, "--plan")
    shown = run(*words)
    assert shown.exit_code == 0
    assert "reads: 30 rows" in shown.stdout
    assert "writes: about 30 samples" in shown.stdout
    document = json.loads(run(*words, "--json").stdout)
    assert document["rows"] == 30
    assert document["stored_bytes"] > 0
    assert document["free_bytes"] > document["stored_bytes"]
    assert not out.exists()


def test_recorded_answers_and_settings(run: RunProgram, target: Path, tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", many_rows(5), "conversations")
    words = ("tokenize", source, "--out", tmp_path / "out", "--target", target)
    assert "Run `fledge regenerate` on it first" in run(*words).error
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[tokenize]\nmax_tokens = 90\n")
    more = ("--as-recorded", "--recipe", recipe, "--set", "tokenize.draft_vocab_size=40")
    assert run(*words, *more).exit_code == 0
    corpus = Corpus.open(tmp_path / "out")
    assert max(corpus.lengths) <= 90
    assert len(corpus.vocab_map) == 40
    assert corpus.manifest.plan.settings["as_recorded"] is True


def test_an_unclear_row_is_shown(run: RunProgram, target: Path, tmp_path: Path) -> None:
    source = write_source(tmp_path / "in", [*many_rows(3), UNCLEAR])
    words = ("tokenize", source, "--out", tmp_path / "out", "--target", target)
    stopped = run(*words)
    assert stopped.exit_code == 1
    assert stopped.error.startswith("row sums/1 (row 1 of sums.jsonl) cannot be tokenized")
    assert "message 1 says 'easy'" in stopped.error
    skipped = run(*words, "--set", "tokenize.on_unclear=skip")
    assert skipped.exit_code == 0
    assert "left out 1 row, the first sums/1: the template changes what the" in skipped.stderr


def test_wrong_words(run: RunProgram, answers: Path, target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    missing = run("tokenize", tmp_path / "nowhere", "--out", out, "--target", target)
    assert (missing.exit_code, missing.error) == (1, f"there is no directory {tmp_path}/nowhere.")
    unknown = run("tokenize", answers, "--out", out, "--set", "tokenize.max_token=9")
    assert unknown.exit_code == 2
    assert "did you mean `max_tokens`?" in unknown.error
    assert run("tokenize", answers, "--out", out, "--target", "./nothing").exit_code == 1
    assert not out.exists()


def test_answers_of_the_engine_go_through_token_by_token(
    run: RunProgram, target_dir: Path, tmp_path: Path
) -> None:
    """The verb before this one, in earnest: what was sampled is what has loss."""
    source = write_source(tmp_path / "in", many_rows(3), "conversations")
    words = ("--out", tmp_path / "answers", "--target", target_dir)
    made = run("regenerate", source, *words, "--set", "regenerate.max_tokens=9")
    assert made.exit_code == 0, made.stderr
    done = run("tokenize", tmp_path / "answers", "--out", tmp_path / "out", "--target", target_dir)
    assert done.exit_code == 0, done.stderr
    sampled = [row.answers[0].token_ids for row in read_rows(tmp_path / "answers")]
    corpus = Corpus.open(tmp_path / "out")
    assert [tuple(one.token_ids[one.loss_mask]) for one in corpus] == sampled
