"""The data stages one after the other: what each says about its input, down to the corpus."""

import json
from pathlib import Path
from typing import Any

import pytest

from fledge.models.tokenizer import TargetTokenizer
from fledge.store.corpus import Corpus
from fledge.store.manifest import read_manifest
from fledge.store.rows import read_rows
from tests.e2e.conftest import RunProgram
from tests.unit.data.flaky_server import FlakyServer

RECIPE = """
target = "TARGET"

[[prepare.sources]]
name = "rivers"
path = "rivers.jsonl"
licence = "MIT"

[[prepare.sources]]
name = "talks"
path = "talks.jsonl"
licence = "CC-BY-4.0"

[regenerate]
turns = "all"
max_tokens = 12
temperatures = [0.0]

[tokenize]
max_tokens = 400
on_unclear = "skip"  # the tiny target's template has no place for tool calls
"""
CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "depth", "arguments": '{"lake": "Como"}'},
}
TOOL = {"type": "function", "function": {"name": "depth", "parameters": {"type": "object"}}}
TALKS: list[dict[str, Any]] = [
    {
        "id": "first",
        "messages": [
            {"role": "user", "content": "Is it deep?"},
            {"role": "assistant", "content": "Very."},
            {"role": "user", "content": "And cold?"},
            {"role": "assistant", "content": "Yes."},
        ],
    },
    {
        "messages": [
            {"role": "user", "content": "How deep is Lake Como? [call depth]"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "410 m"},
            {"role": "assistant", "content": "410 metres."},
        ],
        "tools": [TOOL],
    },
]


@pytest.fixture
def recipe(tmp_path: Path, target_dir: Path) -> Path:
    rivers = [{"prompt": f"How long is river number {number}?"} for number in range(5)]
    for name, rows in (("rivers", rivers), ("talks", TALKS)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("TARGET", str(target_dir)))
    return path


def run_all(run: RunProgram, recipe: Path, *way: object) -> Path:
    """All three verbs; returns the directory of their directories."""
    folder = recipe.parent
    chosen = ("--recipe", recipe)
    for words in (
        ("prepare", recipe, "--out", folder / "conversations"),
        ("regenerate", folder / "conversations", "--out", folder / "answers", *chosen, *way),
        ("tokenize", folder / "answers", "--out", folder / "corpus", *chosen),
    ):
        done = run(*words)
        assert done.exit_code == 0, done.stderr
    return folder


def test_a_corpus_knows_where_it_came_from(run: RunProgram, recipe: Path) -> None:
    with FlakyServer() as server:
        folder = run_all(run, recipe, "--url", server.url)
    conversations, answers, corpus = (
        read_manifest(folder / name) for name in ("conversations", "answers", "corpus")
    )
    assert answers.plan.parents == {"conversations": conversations.fingerprint}
    assert corpus.plan.parents == {"answers": answers.fingerprint}
    assert corpus.plan.identity["target"] == "tiny"
    assert corpus.plan.identity["answered_by"] == answers.plan.identity["model"]
    assert {name: one["licences"] for name, one in corpus.counts["sources"].items()} == {
        "rivers": ["MIT"],
        "talks": ["CC-BY-4.0"],
    }
    origins = {row.id: row.origin for row in read_rows(folder / "answers")}
    assert (origins["talks/1"].row_id, origins["talks/1"].file) == ("first", "talks.jsonl")
    assert {one.row_id for one in Corpus.open(folder / "corpus")} <= set(origins)


def test_the_data_card_goes_along(run: RunProgram, recipe: Path) -> None:
    with FlakyServer() as server:
        folder = run_all(run, recipe, "--url", server.url)
    first = json.loads((folder / "conversations" / "card.json").read_text())
    card = json.loads((folder / "corpus" / "card.json").read_text())
    assert {key: card[key] for key in first} == first
    assert card["answers"]["rows"] == 7
    assert card["answers"]["settings"]["turns"] == "all"
    for name in ("rivers", "talks"):
        assert 0 < card["corpus"]["sources"][name]["vocabulary_coverage"] <= 1
    page = (folder / "corpus" / "card.md").read_text()
    assert page.startswith((folder / "conversations" / "card.md").read_text())
    assert "## Answers\n\ntiny answered every assistant turn again" in page
    assert "| talks | CC-BY-4.0 | 1 |" in page
    assert {"card.json", "card.md"} <= set(read_manifest(folder / "corpus").files)


def test_answers_of_a_url_are_what_has_loss(
    run: RunProgram, recipe: Path, target_dir: Path
) -> None:
    with FlakyServer() as server:
        folder = run_all(run, recipe, "--url", server.url)
    (talk,) = [row for row in read_rows(folder / "answers") if row.id == "talks/1"]
    said = [talk.messages[answer.message]["content"] + "<eos>" for answer in talk.answers]
    assert len(said) == 2
    tokenizer = TargetTokenizer.load(target_dir)
    (sample,) = [one for one in Corpus.open(folder / "corpus") if one.row_id == "talks/1"]
    has_loss = sample.token_ids[sample.loss_mask].tolist()
    assert tokenizer.decode(has_loss, keeps_special_tokens=True) == "".join(said)


def test_what_the_engine_sampled_is_what_has_loss(run: RunProgram, recipe: Path) -> None:
    folder = run_all(run, recipe)
    rows = {row.id: row for row in read_rows(folder / "answers")}
    assert len(rows) == 7
    for sample in Corpus.open(folder / "corpus"):
        sampled = {answer.message: answer.token_ids or () for answer in rows[sample.row_id].answers}
        assert sample.message in sampled
        has_loss = tuple(sample.token_ids[sample.loss_mask].tolist())
        assert has_loss[-len(sampled[sample.message]) :] == sampled[sample.message]
