"""Rows that hold a benchmark's prompt are found, by every rule, and others are left alone."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.contracts.conversation import Conversation, Origin
from fledge.contracts.data_settings import DecontaminateSettings, SourceSettings
from fledge.contracts.errors import ArtifactError, ConfigError, FledgeError
from fledge.contracts.progress import SilentProgress
from fledge.data.decontaminate import TEMPLATE_TURNS, Decontaminator, Overlap
from fledge.data.prompt_text import all_texts, fold, split_words
from fledge.data.sources import open_source
from fledge.data.word_windows import WordWindows, weigh

ORIGIN = Origin(source="s", licence="none", file="f", row=1)
RIVERS = (
    "Name the three longest rivers of Europe and say into which sea each of them flows, please."
)
STORY = (
    "An old clock in the tower of a small town stops every night at the same minute and nobody "
    "knows why"
)
CHINESE = "请说出欧洲最长的三条河流，并说明每条河流流入哪个海洋，最后再比较它们的长度和流域面积。"


def row(*texts: str, role: str = "user") -> Conversation:
    messages = tuple({"role": role, "content": text} for text in texts)
    return Conversation(id="1", messages=messages, origin=ORIGIN)


def decontaminator(directory: Path, ngram: int = 13, **files: list[Any]) -> Decontaminator:
    """Benchmarks of given names, each with turns of one conversation per entry."""
    for name, entries in files.items():
        turns = [[one] if isinstance(one, str) else one for one in entries]
        lines = [json.dumps({"turns": one}) for one in turns]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    paths = tuple(str(directory / f"{name}.jsonl") for name in files)
    settings = DecontaminateSettings(against=paths, ngram=ngram)
    return Decontaminator(settings, SilentProgress())


@pytest.fixture
def rivers(tmp_path: Path) -> Decontaminator:
    return decontaminator(
        tmp_path, rivers=[RIVERS], story=[[STORY, "Can you parallelize it?"]], zh=[CHINESE]
    )


def test_equal_prompts(rivers: Decontaminator) -> None:
    assert rivers.overlap(row(RIVERS)) == "rivers.jsonl"
    found = rivers.find(row("Hello!", RIVERS.upper().replace(",", " –"), "Thanks."))
    assert found is not None
    assert (found.benchmark, found.rule) == ("rivers.jsonl", "equal")
    assert rivers.overlap(row(CHINESE.replace("，", " "))) == "zh.jsonl"


def test_prompts_contained_in_any_part_of_a_row(rivers: Decontaminator) -> None:
    inside = f"Here is a question. {RIVERS} Answer it!"
    for role in ("system", "user", "assistant", "tool"):
        found = rivers.find(row("Hello", inside, role=role))
        assert found == Overlap("rivers.jsonl", "contained", " ".join(split_words(fold(RIVERS))))
    tool = {"type": "function", "function": {"name": "ask", "description": inside}}
    with_tool = Conversation(id="1", messages=row("Hi").messages, origin=ORIGIN, tools=(tool,))
    assert rivers.overlap(with_tool) == "rivers.jsonl"
    call = {"role": "assistant", "content": None, "tool_calls": [{"arguments": inside}]}
    assert rivers.overlap(Conversation(id="1", messages=(call,), origin=ORIGIN)) == "rivers.jsonl"
    assert rivers.overlap(row(f"好的。{CHINESE}谢谢你。")) == "zh.jsonl"


def test_shared_words_in_a_row(rivers: Decontaminator) -> None:
    words = STORY.split()
    part = " ".join(words[4:17])
    found = rivers.find(row(f"Yesterday {part} yesterday"))
    assert found == Overlap("story.jsonl", "shared", part.lower())
    assert rivers.find(row(" ".join(words[4:16]))) is None
    assert rivers.find(row(" ".join(words[4:10]), " ".join(words[10:17]))) is None
    assert rivers.find(row(" ".join([*words[4:10], "indeed", *words[10:17]]))) is None


def test_characters_without_spaces_count_half_a_word(rivers: Decontaminator) -> None:
    letters = "".join(split_words(CHINESE))
    found = rivers.find(row(f"我们{letters[3:29]}吗"))
    assert found is not None
    assert (found.rule, found.text) == ("shared", " ".join(letters[3:29]))
    assert rivers.find(row(f"我们{letters[3:28]}吗")) is None


def test_counts_are_kept_by_benchmark_and_rule(rivers: Decontaminator) -> None:
    for text in (RIVERS, RIVERS, RIVERS + " Now.", " ".join(STORY.split()[:14]), "nothing"):
        rivers.find(row(text))
    assert rivers.counts == {
        "rivers.jsonl": {"equal": 2, "contained": 1},
        "story.jsonl": {"shared": 1},
        "zh.jsonl": {},
    }


def test_short_prompts_are_found_as_whole_words_only(rivers: Decontaminator) -> None:
    assert rivers.overlap(row("It is slow. Can you parallelize it? Thanks!")) == "story.jsonl"
    assert rivers.overlap(row("Can you parallelize items?")) is None
    assert rivers.overlap(row("Can you", "parallelize it?")) is None


def test_tiny_prompts_must_open_both_conversations(tmp_path: Path) -> None:
    found = decontaminator(tmp_path, tiny=["Why?", ["Explain recursion.", "Go on."], "你好吗"])
    assert found.overlap(row("Why")) == "tiny.jsonl"
    assert found.overlap(row("Explain  RECURSION!", "Thanks")) == "tiny.jsonl"
    assert found.overlap(row("你好吗？")) == "tiny.jsonl"
    for other in (row("Why not?"), row("Hello", "Why?"), row("Go on."), row("Go on", "Go on")):
        assert found.overlap(other) is None
    assert found.overlap(row("Why?", role="system")) is None


def test_templates_of_a_benchmark_do_not_count_but_whole_prompts_do(tmp_path: Path) -> None:
    task = (
        "Summarise the following article in exactly three sentences and keep every number that "
        "it has: "
    )
    items = [f"{task}item {i} {'about ' * (i % 3)}matters" for i in range(TEMPLATE_TURNS)]
    found = decontaminator(tmp_path, task=[*items, RIVERS])
    assert found.overlap(row(task + "a text of our own")) is None
    assert found.overlap(row("Well: " + items[3])) == "task.jsonl"
    fewer = decontaminator(tmp_path, task=items[1:])
    assert fewer.overlap(row(task + "a text of our own")) == "task.jsonl"


def test_prompts_that_several_benchmarks_have_belong_to_the_first(tmp_path: Path) -> None:
    found = decontaminator(tmp_path, one=[RIVERS], two=[RIVERS, STORY])
    assert [found.overlap(row(text)) for text in (RIVERS, STORY)] == ["one.jsonl", "two.jsonl"]


def test_the_size_of_ngrams_is_a_setting(tmp_path: Path) -> None:
    found = decontaminator(tmp_path, ngram=5, story=[STORY])
    assert found.overlap(row("They say the tower of a small one")) == "story.jsonl"
    assert found.overlap(row("They say the tower of a big one")) is None


def test_very_long_rows(rivers: Decontaminator) -> None:
    draw = random.Random(0)
    words = draw.choices([*STORY.split(), *"绿色河流", "other"], k=60_000)
    assert rivers.find(row(" ".join(words))) is None
    words[40_000:40_000] = RIVERS.split()
    assert rivers.overlap(row(" ".join(words))) == "rivers.jsonl"


def test_benchmarks_without_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    with pytest.raises(FledgeError, match="empty.jsonl"):
        Decontaminator(DecontaminateSettings(against=(str(path),)), SilentProgress())
    path.write_text('{"messages": [{"role": "system", "content": "Be brief."}]}\n')
    with pytest.raises((ConfigError, ArtifactError), match="empty.jsonl"):
        Decontaminator(DecontaminateSettings(against=(str(path),)), SilentProgress())
    with pytest.raises(FledgeError, match="absent"):
        Decontaminator(DecontaminateSettings(against=(str(tmp_path / "absent"),)), SilentProgress())


@given(
    st.lists(st.sampled_from(["a", "b", "c", "河", "流", "\n"]), max_size=40),
    st.integers(3, 6),
)
def test_windows_are_those_of_a_plain_search(words: list[str], num_words: int) -> None:
    windows = WordWindows({"a", "b", "c", "河", "流"}, num_words)
    plain = []
    for start in range(len(words)):
        ends = (e for e in range(start, len(words) + 1) if weigh(words[start:e]) >= 2 * num_words)
        end = next(ends, None)
        if end is not None:
            plain.append((start, end))
    hashes = windows.hashes(words).tolist()
    assert [(start, windows.end(words, start)) for start in range(len(hashes))] == plain
    texts = [tuple(words[start:end]) for start, end in plain]
    assert len(set(zip(texts, hashes, strict=True))) == len(set(texts)) == len(set(hashes))


def test_real_files(train_data: Path, bench_data: Path) -> None:
    """No row that is kept holds a benchmark's prompt, by a search of another kind."""
    benchmarks = tuple(str(path) for path in sorted(bench_data.iterdir()))
    found = Decontaminator(DecontaminateSettings(against=benchmarks), SilentProgress())
    prompts = [
        " ".join(split_words(fold(message["content"])))
        for path in benchmarks
        for one in read(path)
        for message in one.messages
    ]
    kept, overlaps = [], 0
    for one in read(str(train_data / "gsm8k_train.jsonl")):
        overlap = found.find(one)
        overlaps += overlap is not None
        if overlap is None:
            kept.append("|".join(" ".join(split_words(fold(text))) for text in all_texts(one)))
    everything = "|".join(kept)
    assert not [prompt for prompt in prompts[::40] if f" {prompt} " in everything]
    assert 0 < overlaps < 20
    for one in read(benchmarks[0]):
        assert found.overlap(one) is not None


def read(path: str) -> list[Conversation]:
    source = SourceSettings(name="real", path=(path,), licence="none")
    reader = open_source(
        source, on_bad_row="stop", max_turn_chars=1_000_000, progress=SilentProgress()
    )
    return list(reader)


def test_neither_filter_needs_torch() -> None:
    modules = "import sys, fledge.data.duplicates, fledge.data.decontaminate"
    subprocess.run(
        [sys.executable, "-c", f"{modules}; assert 'torch' not in sys.modules"], check=True
    )
