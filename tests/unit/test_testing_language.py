"""The tiny language: prompts that differ, answers by rule, a target that mostly speaks it."""

from pathlib import Path

from fledge.store.corpus import Corpus
from fledge.store.rows import read_rows
from fledge.testing_language import answer, ask


def test_prompts_differ_and_answers_follow_the_rule() -> None:
    prompts = ask(500)
    assert len(set(prompts)) == 500
    assert ask(500) == prompts
    assert ask(5, seed=1) != prompts[:5]
    assert answer("fox hare eel") == "the fox hears the hare. the hare finds the eel."


def test_the_target_speaks_the_language(language_corpus: Path) -> None:
    rows = list(read_rows(language_corpus.parent / "answers"))
    said = {row.messages[0]["content"]: row.messages[1]["content"] for row in rows}
    first_words = [text.split()[:2] == answer(ask).split()[:2] for ask, text in said.items()]
    assert len(said) == len(Corpus.open(language_corpus)) == 240
    assert sum(first_words) / len(first_words) > 0.5, "it looks at what it is asked"
    assert len(set(said.values())) > 120, "and says different things"
