"""Prompts that a tiny target writes: where sampling starts, what is kept, how a run goes on."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.data_settings import SelfSettings, SourceSettings
from fledge.contracts.errors import ConfigError, MismatchError
from fledge.contracts.progress import SilentProgress, Task
from fledge.data.self_prompts import SelfPromptWriter
from fledge.data.self_topics import LANGUAGES, SYSTEM_PROMPTS, TOPICS
from fledge.engine.engine import Engine
from fledge.testing import target_of, tiny_model
from tests.unit.data.self_support import writing_engine

SOURCE = SourceSettings(name="own", path=("self",), licence="Apache-2.0")
SETTINGS = SelfSettings(rows=4, max_tokens=40)


class Notes(SilentProgress):
    """Progress that remembers what was said."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.tasks: list[tuple[str, int | None, str]] = []

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Task]:
        self.tasks.append((label, total, unit))
        with super().task(label, total, unit) as task:
            yield task

    def note(self, text: str) -> None:
        self.notes.append(text)


class CountingEngine(Engine):
    """An engine that knows how many prompts it was given."""

    num_prompts = 0

    def add(self, request: Any, **more: Any) -> Any:
        self.num_prompts += 1
        return super().add(request, **more)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return writing_engine()


@pytest.fixture(scope="module")
def rows(engine: Engine) -> list[dict[str, Any]]:
    return write(engine)


def write(
    engine: Engine,
    *,
    seed: int = 0,
    journal: Path | None = None,
) -> list[dict[str, Any]]:
    writer = SelfPromptWriter(engine, journal=journal)
    return [row.to_json() for row in writer(SOURCE, SETTINGS, seed)]


def prompts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]


def test_rows_are_prompts_with_an_origin(rows: list[dict[str, Any]]) -> None:
    assert [row["id"] for row in rows] == ["own/1", "own/2", "own/3", "own/4"]
    for number, row in enumerate(rows, start=1):
        origin = row["origin"]
        assert origin.pop("row_id").startswith("try ")
        assert origin == {"source": "own", "licence": "Apache-2.0", "file": "self", "row": number}
        assert row["messages"][-1]["role"] == "user"
        for message in row["messages"][:-1]:
            assert message["role"] == "system"
            assert message["content"] in SYSTEM_PROMPTS
    assert len(set(prompts(rows))) == 4
    assert all(len(text.split()) >= 3 and text == text.strip() for text in prompts(rows))


def test_the_same_run_gives_the_same_rows(engine: Engine, rows: list[dict[str, Any]]) -> None:
    assert prompts(write(engine)) == prompts(rows)


def test_source_and_seed_decide_every_try(engine: Engine) -> None:
    writer = SelfPromptWriter(engine)
    other = SourceSettings(name="other", path=("self",), licence="MIT")
    runs = [(SOURCE, 0), (SOURCE, 1), (other, 0)]
    seeds = [
        writer._planner.plan(source, SETTINGS, seed, number).seed
        for source, seed in runs
        for number in range(20)
    ]
    assert len(set(seeds)) == 60


def test_tries_start_where_the_user_writes(engine: Engine) -> None:
    writer = SelfPromptWriter(engine)
    tries = [writer._planner.plan(SOURCE, SETTINGS, 0, number) for number in range(40)]
    assert engine.target.tokenizer is not None
    leads = [
        engine.target.tokenizer.decode(one.lead_ids, keeps_special_tokens=True) for one in tries
    ]
    for one, lead in zip(tries, leads, strict=True):
        assert lead.startswith("<|system|>" + one.system)
        assert lead.endswith(f"The user writes in {one.language.name}.<eos><|user|>")
        assert not one.opener
    assert len(set(leads)) > 35
    assert 10 < sum(not one.system for one in tries) < 30
    assert 10 < sum(one.language.name == "English" for one in tries) < 30


def test_lists_of_the_recipe_replace_the_built_in_ones(engine: Engine) -> None:
    settings = SelfSettings(
        rows=3,
        max_tokens=40,
        system_prompts=("Be brief.",),
        topics=("owls",),
        languages=("Klingon", "french"),
    )
    writer = SelfPromptWriter(engine)
    tries = [writer._planner.plan(SOURCE, settings, 0, number) for number in range(12)]
    assert {one.system for one in tries} == {"Be brief."}
    assert {one.language.name for one in tries} == {"Klingon", "French"}
    assert engine.target.tokenizer is not None
    assert "about owls." in engine.target.tokenizer.decode(tries[0].lead_ids)
    rows = [row.to_json() for row in writer(SOURCE, settings, 0)]
    assert [row["messages"][0]["content"] for row in rows] == ["Be brief."] * 3


def test_targets_without_a_place_for_system_prompts_are_given_beginnings() -> None:
    template = (
        "{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{ raise_exception('no system') }}{% endif %}"
        "<|user|>{{ message['content'] }}<eos>{% endfor %}<|assistant|>"
    )
    writer = SelfPromptWriter(writing_engine(template=template))
    tries = [writer._planner.plan(SOURCE, SETTINGS, 0, number) for number in range(40)]
    assert {one.system for one in tries} == {""}
    assert all(one.opener for one in tries if one.language.name != "English")
    assert {bool(one.opener) for one in tries if one.language.name == "English"} == {True, False}
    rows = list(writer(SOURCE, SETTINGS, 0))
    assert len(rows) == 4
    assert all(len(row.messages) == 1 for row in rows)


def test_targets_without_a_template_continue_texts() -> None:
    engine = writing_engine(has_chat_template=False)
    texts = prompts(write(engine))
    assert len(texts) == 4
    beginnings = [opener for language in LANGUAGES for opener in language.openers]
    for text in texts:
        stems = [opener.split("{topic}")[0].strip() for opener in beginnings]
        assert any(text.startswith(stem) and len(text) > len(stem) for stem in stems), text


def test_reports_add_up(engine: Engine) -> None:
    notes = Notes()
    writer = SelfPromptWriter(engine, progress=notes)
    assert len(list(writer(SOURCE, SETTINGS, 0))) == 4
    report = writer.report("own")
    assert report.kept == report.measured_prompts == 4
    assert report.tries == 4 + sum(report.flaws.values())
    assert report.share_kept == 4 / report.tries
    assert 0 < report.distinct_1 <= report.distinct_2 <= 1
    assert report.mean_words >= 3
    assert notes.tasks == [("asking the target for prompts (own)", 4, "rows")]
    assert notes.notes == []


def test_a_target_that_writes_nothing_usable_ends_the_tries(engine: Engine) -> None:
    notes = Notes()
    writer = SelfPromptWriter(engine, progress=notes)
    settings = SelfSettings(rows=16, max_tokens=4)
    assert list(writer(SOURCE, settings, 0)) == []
    report = writer.report("own")
    assert report.tries == 5 * 16 + 64
    assert set(report.flaws) <= {"cut off", "short", "empty"}
    assert len(notes.notes) == 1
    assert f"wrote 0 usable prompts in {report.tries} tries, and 16 were asked" in notes.notes[0]


def test_an_interrupted_run_asks_only_for_the_rest(
    engine: Engine, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    whole = prompts(rows)
    counting = CountingEngine(engine.target)
    first = SelfPromptWriter(counting, journal=tmp_path)(SOURCE, SETTINGS, 0)
    begun = [next(first).messages[-1]["content"] for _ in range(2)]
    first.close()
    assert begun == whole[:2]
    num_asked = counting.num_prompts

    journal = tmp_path / "own.jsonl"
    num_lines = len(journal.read_text(encoding="utf-8").splitlines())
    with journal.open("a", encoding="utf-8") as file:
        file.write('[["half a ba')
    assert prompts(write(counting, journal=tmp_path)) == whole
    lines = journal.read_text(encoding="utf-8").splitlines()
    batches = [json.loads(line) for line in lines[1:]]
    assert len(lines) > num_lines
    assert sum(map(len, batches)) == counting.num_prompts > num_asked

    assert prompts(write(counting, journal=tmp_path)) == whole
    assert sum(map(len, batches)) == counting.num_prompts


def test_journals_of_other_work_are_refused(engine: Engine, tmp_path: Path) -> None:
    write(engine, journal=tmp_path)
    with pytest.raises(MismatchError, match=r"own.jsonl holds prompts for seed = 0, .* seed = 7"):
        write(engine, seed=7, journal=tmp_path)
    (tmp_path / "own.jsonl").write_text("torn")
    assert len(write(engine, journal=tmp_path)) == 4
    with pytest.raises(ConfigError, match="cannot write"):
        write(engine, journal=tmp_path / "own.jsonl")


def test_a_target_without_a_tokenizer_cannot_write() -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        SelfPromptWriter(Engine(target_of(tiny_model())))


def test_built_in_lists() -> None:
    assert len(set(SYSTEM_PROMPTS)) == 24
    assert len(set(TOPICS)) == 60
    assert len({language.name for language in LANGUAGES}) == 12
    assert LANGUAGES[0].name == "English"


@pytest.mark.slow
def test_the_default_target_writes_prompts() -> None:
    writer = SelfPromptWriter(Engine.load("smollm2-135m-instruct"))
    rows = list(writer(SOURCE, SelfSettings(rows=8, max_tokens=64), 0))
    assert len(rows) == 8
    assert writer.report("own").share_kept > 0.3
