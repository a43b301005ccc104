"""The labelled sentences are labelled rightly, and the filter stays as good on them as it is."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from fledge.contracts.data_settings import PRIVACY_TYPES
from fledge.data.privacy import find
from fledge.data.privacy.letter_ids import CODES
from fledge.data.privacy.national_ids import NATIONAL_ID_RULES

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests" / "data" / "privacy_sentences.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
# Measured, less a little: a change that costs more than one sentence of a type is seen here.
FLOORS = {"tuning": (0.99, 0.99), "held_out": (0.96, 0.97)}
TYPE_FLOOR = {"tuning": 0.93, "held_out": 0.85}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The program that makes the published figures: the test counts as it does."""
    spec = importlib.util.spec_from_file_location("measure", ROOT / "tools" / "measure_privacy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_spans_are_where_their_values_are() -> None:
    kinds = {rule.kind for rule in NATIONAL_ID_RULES} | {code.kind for code in CODES}
    for row in ROWS:
        end = 0
        for span in row["spans"]:
            assert end <= span["start"] < span["end"] <= len(row["text"]), row["id"]
            assert row["text"][span["start"] : span["end"]] == span["value"], row["id"]
            assert span["type"] in PRIVACY_TYPES
            assert span.get("kind", "passport") in kinds, row["id"]
            end = span["end"]


def test_the_set_is_large_and_mixed() -> None:
    assert len(ROWS) >= 400
    assert len({row["id"] for row in ROWS}) == len({row["text"] for row in ROWS}) == len(ROWS)
    assert {row["part"] for row in ROWS} == {"tuning", "held_out"}
    languages = [row["language"] for row in ROWS]
    assert sum(languages.count(language) >= 10 for language in set(languages)) >= 6
    assert sum(not row["spans"] for row in ROWS) >= 150
    assert {span["type"] for row in ROWS for span in row["spans"]} == set(PRIVACY_TYPES)


def test_secrets_are_not_in_the_file_as_they_are() -> None:
    """Scanners of repositories would take the invented ones for leaked ones."""
    raw = FILE.read_text(encoding="utf-8")
    values = [s["value"] for row in ROWS for s in row["spans"] if s["type"] == "secret"]
    assert not [value for value in values if json.dumps(value)[1:-1] in raw]


@pytest.mark.parametrize("part", FLOORS)
def test_precision_and_recall_do_not_fall(part: str, tool: ModuleType) -> None:
    sentences = [sentence for sentence in tool.load_sentences() if sentence.part == part]
    scores, mistakes = tool.measure_quality(sentences, find)
    precision, recall = FLOORS[part]
    assert scores["all"].precision >= precision, mistakes
    assert scores["all"].recall >= recall, mistakes
    for name, score in scores.items():
        assert min(score.precision, score.recall) >= TYPE_FLOOR[part], (name, mistakes)


def test_published_figures_are_those_of_the_rules(tool: ModuleType) -> None:
    newest = sorted((ROOT / "benchmarks").glob("*-privacy.json"))[-1]
    published = json.loads(newest.read_text(encoding="utf-8"))
    measured = json.loads(json.dumps(tool.quality_report(tool.load_sentences(), find)))
    assert published["quality"] == measured, f"run tools/measure_privacy.py --out {newest.name}"


def test_documents_have_equal_lengths_and_corpora_are_read(
    tmp_path: Path, tool: ModuleType
) -> None:
    lines, array = tmp_path / "a.jsonl", tmp_path / "b.json"
    lines.write_text('{"x": "one"}\n{"x": ["two", {"y": "three"}], "n": 4}\n', encoding="utf-8")
    array.write_text('["four"]', encoding="utf-8")
    texts = tool.read_corpus([lines, array])
    assert texts == ["one", "two", "three", "four"]
    made = tool.documents(texts)
    assert len(made) >= tool.MIN_DOCUMENTS
    assert {len(document) for document in made[:-1]} == {tool.DOCUMENT_CHARS}
    assert re.match("one\ntwo", made[0])
