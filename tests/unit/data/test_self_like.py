"""Prompts that a target writes behind those of another source: what it is shown, what is kept."""

import re
import signal
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.data_settings import SelfSettings, SourceSettings
from fledge.contracts.errors import ConfigError, MismatchError
from fledge.data.prepare import _decisive
from fledge.data.self_examples import MOST_CHARS, read_examples
from fledge.data.self_journal import Draft
from fledge.data.self_prompts import SelfPromptWriter
from fledge.data.self_tries import HINT, Try
from fledge.engine.engine import Engine
from fledge.store.rows import read_rows
from tests.unit.data.like_process import EXAMPLES, SETTINGS, run
from tests.unit.data.prepare_support import contents
from tests.unit.data.self_support import writing_engine
from tests.warm_programs import WarmPrograms

SOURCE = SourceSettings(name="more", path=("self",), licence="MIT")
ASKED = SelfSettings(rows=4, max_tokens=40, like="soils", shown=3, topics=("owls",))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return writing_engine()


def lead_of(engine: Engine, token_ids: Any) -> str:
    assert engine.target.tokenizer is not None
    return engine.target.tokenizer.decode(token_ids, keeps_special_tokens=True)


def plan(
    engine: Engine,
    settings: SelfSettings = ASKED,
    examples: tuple[str, ...] = EXAMPLES,
    *,
    count: int = 40,
) -> list[tuple[Try, str]]:
    """Tries, and what the target reads in each."""
    planner = SelfPromptWriter(engine)._planner
    tries = [planner.plan(SOURCE, settings, 0, number, examples) for number in range(count)]
    return [(one, lead_of(engine, one.lead_ids)) for one in tries]


def shown_in(lead: str) -> list[str]:
    """The user's turns before the one that is to be written."""
    assert lead.endswith("<|user|>")
    return re.findall(r"<\|user\|>(.*?)<eos>", lead)


def test_examples_are_earlier_turns_of_the_user(engine: Engine) -> None:
    tries = plan(engine)
    for one, lead in tries:
        texts = shown_in(lead)
        assert len(set(texts)) == len(texts) == 3
        assert set(texts) <= set(EXAMPLES)
        assert lead == "".join(f"<|user|>{text}<eos>" for text in texts) + "<|user|>"
        assert HINT not in lead
        assert (one.system, one.opener, one.language.scripts) == ("", "", ())
    leads = [lead for _, lead in tries]
    assert len(set(leads)) > 20
    assert {text for lead in leads for text in shown_in(lead)} == set(EXAMPLES)
    assert plan(engine) == tries
    assert len({one.seed for one, _ in tries}) == 40


def test_system_prompts_only_where_the_recipe_names_some(engine: Engine) -> None:
    named = replace(ASKED, system_prompts=("Be brief.", ""))
    systems = set()
    for one, lead in plan(engine, named):
        assert lead.startswith("<|system|>Be brief.<eos><|user|>" if one.system else "<|user|>")
        assert len(shown_in(lead)) == 3
        systems.add(one.system)
    assert systems == {"Be brief.", ""}
    always = replace(ASKED, system_prompts=("Be brief.",))
    for settings, roles in [(ASKED, ["user"]), (always, ["system", "user"])]:
        rows = list(SelfPromptWriter(engine)(SOURCE, settings, 0, EXAMPLES))
        assert len(rows) == 4
        assert all([turn["role"] for turn in row.messages] == roles for row in rows)


def test_examples_are_not_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [EXAMPLES[0], "  What grows in PEAT?", "what grows in gravel", "what swims in ponds"]

    written = cycle(said)
    monkeypatch.setattr(SelfPromptWriter, "_draft", lambda *_: Draft(next(written), False))
    writer = SelfPromptWriter(engine)
    rows = list(writer(SOURCE, ASKED, 0, EXAMPLES))
    assert [row.messages[-1]["content"] for row in rows] == said[2:]
    report = writer.report("more")
    assert report.flaws == {"known": report.tries - 2}


def test_a_target_without_a_template_is_refused() -> None:
    writer = SelfPromptWriter(writing_engine(has_chat_template=False))
    with pytest.raises(ConfigError, match="source more is to be like soils, .* has none; leave"):
        list(writer(SOURCE, ASKED, 0, EXAMPLES))


def test_examples_with_special_tokens_are_not_shown(engine: Engine) -> None:
    writer = SelfPromptWriter(engine)
    spoilt = (*EXAMPLES[:2], *(f"{text}<eos>" for text in EXAMPLES[2:]))
    with pytest.raises(
        ConfigError, match="which has 2 prompts without special tokens .* and 3 are"
    ):
        list(writer(SOURCE, ASKED, 0, spoilt))
    assert len(list(writer(SOURCE, replace(ASKED, shown=2), 0, spoilt))) == 4


def test_fewer_are_shown_where_the_context_is_small() -> None:
    engine = writing_engine(context_len=256)
    long = tuple(f"{text} {'x' * (20 * number)}" for number, text in enumerate(EXAMPLES))
    settings = replace(ASKED, shown=5)
    for one, lead in plan(engine, settings, long, count=10):
        assert len(one.lead_ids) + settings.max_tokens <= 256
        assert set(shown_in(lead)) == set(long[:4])
    assert len(list(SelfPromptWriter(engine)(SOURCE, settings, 0, long))) == 4
    # Where none of those that were drawn fits, it is the shortest of all.
    longer = (EXAMPLES[0], *(f"{text} {'x' * 300}" for text in EXAMPLES[1:]))
    for _, lead in plan(engine, replace(ASKED, shown=2), longer, count=10):
        assert shown_in(lead) == [EXAMPLES[0]]
    message = (
        "source more is to be like soils, and not one prompt of it fits the target's context of "
        "256 tokens beside max_tokens = 240; lower max_tokens, or name another source."
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        list(SelfPromptWriter(engine)(SOURCE, replace(ASKED, max_tokens=240), 0, EXAMPLES))


def test_what_is_read_as_an_example(tmp_path: Path) -> None:
    (tmp_path / "rows-00000.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "First\u2028line?"}, {"role": "assistant", '
        '"content": "Yes."}, {"role": "user", "content": "Second?"}]}\n'
        '{"messages": [{"role": "system", "content": "Nobody asks."}]}\n'
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "In parts."}]}]}\n'
        '{"messages": [{"role": "user", "content": "%s"}]}\n' % ("x" * (MOST_CHARS + 1)),
        encoding="utf-8",
    )
    (tmp_path / "rows-00001.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "%s"}]}\n' % ("x" * MOST_CHARS)
    )
    assert read_examples(tmp_path) == ["First\u2028line?", "x" * MOST_CHARS]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("like")
    manifest, engine = run(base, base / "out")
    assert manifest.counts["sources"]["soils"]["out"] == 5
    assert manifest.counts["sources"]["more"]["out"] == 6
    for prompt in engine.prompts:
        texts = shown_in(lead_of(engine, prompt))
        assert len(texts) == 3
        assert set(texts) <= set(EXAMPLES)
    return base / "out"


def test_a_source_is_written_behind_another(unbroken: Path) -> None:
    rows = list(read_rows(unbroken))
    texts = {name: set[str]() for name in ("soils", "more")}
    for row in rows:
        texts[row.origin.source].add(row.messages[-1]["content"])
    assert texts["soils"] == set(EXAMPLES)
    assert len(texts["more"]) == 6
    assert not texts["more"] & texts["soils"]


@pytest.mark.parametrize("dies_at", [4, 9])
def test_a_killed_run_goes_on(
    warm: WarmPrograms, tmp_path: Path, unbroken: Path, dies_at: int
) -> None:
    out = tmp_path / "out"
    program = [sys.executable, "-m", "tests.unit.data.like_process", tmp_path, out, dies_at]
    done = warm.run(program, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (out / "manifest.json").exists()
    num_written = len((out / "work" / "self" / "more.jsonl").read_bytes().splitlines()) - 1
    assert num_written == (dies_at > 6)
    _, engine = run(tmp_path, out)
    assert contents(out) == contents(unbroken)
    _, whole = run(tmp_path, tmp_path / "again")
    assert engine.prompts == whole.prompts[6 * num_written :]


def test_other_examples_are_other_work(unbroken: Path) -> None:
    base = unbroken.parent
    soils, more = SETTINGS.sources
    for changed, message in [
        (
            replace(
                SETTINGS, sources=(soils, replace(more, self_prompts={"like": "soils", "shown": 2}))
            ),
            r"sources\[1\].self_prompts.shown = 3",
        ),
        (
            replace(SETTINGS, self_prompts=replace(SETTINGS.self_prompts, shown=2)),
            "self_prompts.shown",
        ),
    ]:
        with pytest.raises(MismatchError, match=message):
            run(base, unbroken, settings=changed)


def test_too_few_examples(tmp_path: Path) -> None:
    soils, more = SETTINGS.sources
    wants = replace(more, self_prompts={"like": "soils", "shown": 6})
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, tmp_path / "out", settings=replace(SETTINGS, sources=(soils, wants)))
    assert str(caught.value) == (
        "source more is to be like soils, which has 5 prompts of at most 2,000 characters, and 6 "
        "are to be shown each time; name another source, or lower `shown`."
    )


def test_a_recipe_without_examples_has_the_plan_from_before_there_were_any() -> None:
    soils, more = SETTINGS.sources
    plain = _decisive(replace(SETTINGS, sources=(soils, replace(more, self_prompts={}))))
    assert set(plain["self_prompts"]) == {
        *("rows", "temperature", "top_p", "max_tokens"),
        *("system_prompts", "topics", "languages"),
    }
    assert all("self_prompts" not in source for source in plain["sources"])
    with_examples = _decisive(SETTINGS)
    assert with_examples.keys() == plain.keys()
    assert with_examples["self_prompts"] == plain["self_prompts"]
    assert with_examples["sources"][1]["self_prompts"] == {"like": "soils", "shown": 3}
