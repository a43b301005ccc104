"""Words for comparing: the same however a text is typed, in any script."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fledge.contracts.conversation import Conversation, Origin
from fledge.data.prompt_text import (
    all_texts,
    fold,
    is_unspaced,
    normalise,
    prompt_side,
    split_words,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Janet\u2019s ducks lay 16 eggs!", ["janet", "s", "ducks", "lay", "16", "eggs"]),
        ("def has_close(x: float):", ["def", "has_close", "x", "float"]),
        ("$1,000.50", ["1", "000", "50"]),
        ("Straße ﬁnden ＡＢＣ", ["strasse", "finden", "abc"]),
        ("我有3个苹果。", ["我", "有", "3", "个", "苹", "果"]),
        ("東京タワーへ行く", list("東京タワーへ行く")),
        ("ไปไหน", list("ไปไหน")),
        ("한국어 단어", ["한국어", "단어"]),
        ("हिन्दी में लिखिए", ["हिन्दी", "में", "लिखिए"]),
        ("می\u200cخواهم", ["میخواهم"]),
        ("co\u00adoperate a\u200bb", ["cooperate", "a", "b"]),
        ("🙂 — …", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert split_words(fold(text)) == words


def test_normalising_keeps_punctuation() -> None:
    assert normalise("  What is\tC++?\n") == "what is c++?"


@given(st.text())
def test_folding_twice_changes_nothing(text: str) -> None:
    assert fold(fold(text)) == fold(text)
    for word in split_words(fold(text)):
        assert word
        assert len(word) == 1 or not is_unspaced(word) or not any(map(is_unspaced, word[1:]))


def test_sides_of_a_conversation() -> None:
    call = {"id": "1", "function": {"name": "look", "arguments": "{}"}}
    conversation = Conversation(
        id="1",
        messages=(
            {"role": "developer", "content": "Be  BRIEF."},
            {"role": "user", "content": "Short question?\n" + "long " * 80},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "Result"},
            {"role": "assistant", "content": "Answer"},
        ),
        origin=Origin(source="s", licence="none", file="f", row=1),
        tools=({"type": "function", "function": {"name": "look"}},),
    )
    side = prompt_side(conversation)
    assert side.frame.startswith("be brief.\n")
    assert '"look"' in side.frame
    assert side.turns == "user short question? " + ("long " * 80).strip() + "\ntool result"
    assert side.short_lines == "short question?"
    texts = list(all_texts(conversation))
    assert [text[:6] for text in texts[:2]] == ["Be  BR", "Short "]
    assert "Answer" in texts
    assert sum("look" in text for text in texts) == 2
