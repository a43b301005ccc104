"""What may not stand as a prompt, and figures of diversity that can be checked by hand."""

import unicodedata

import pytest

from fledge.data.prompt_text import split_words
from fledge.data.self_filter import DiversityMeter, Flaw, find_flaw
from fledge.data.self_topics import LANGUAGES, TOPICS

LATIN, CYRILLIC, CHINESE = ("LATIN",), ("CYRILLIC",), ("CJK",)

GOOD = [
    ("How do I sort a list in Python?", LATIN),
    ("Sure-footed goats: how do they climb?", LATIN),
    ("How can I help my son with algebra?", LATIN),
    ("Gibt es ein Rezept für Brot ohne Hefe?", LATIN),
    ("Как испечь хлеб без дрожжей?", CYRILLIC),
    ("Please explain recursion to a child.", CYRILLIC),
    ("请问如何用Python写一个排序函数？", CHINESE),
    ("Add the numbers 1, 1, 1, 2 and 3.", LATIN),
    ("Fix this:\n\n\tprint('hello')\n", LATIN),
    ("What does 河 mean in an English text about rivers and lakes?", LATIN),
]
FLAWED: list[tuple[str, tuple[str, ...] | None, Flaw]] = [
    ("", LATIN, "empty"),
    (" \n ", LATIN, "empty"),
    ("Why?", LATIN, "short"),
    ("你好吗", CHINESE, "short"),
    (" ".join(f"word{i}" for i in range(1100)), LATIN, "long"),
    ("Name the river<|im_end|> of Europe", LATIN, "debris"),
    ("A broken character \ufffd in a text", LATIN, "debris"),
    ("A bell \x07 rings in the tower", LATIN, "debris"),
    ("A private \ue000 character in a text", LATIN, "debris"),
    ("Sure, here is a recipe for bread.", LATIN, "answer"),
    ('"Certainly! The answer is four.', LATIN, "answer"),
    ("As an AI language model I cannot eat.", LATIN, "answer"),
    ("I\u2019m sorry, but I cannot do that.", LATIN, "answer"),
    ("How can I assist you today?", LATIN, "answer"),
    ("Конечно, вот рецепт хлеба.", CYRILLIC, "answer"),
    ("当然可以，这是一个食谱。", CHINESE, "answer"),
    ("it was tyranny, tyranny, tyranny, tyranny, tyranny", LATIN, "repeats"),
    ("look at this" + "!" * 30, LATIN, "repeats"),
    ("the cat sat on the mat " * 6, LATIN, "repeats"),
    ("Что это значит, скажите пожалуйста", LATIN, "script"),
    ("О, cows מלקקם חכד חעץ בעבתיכן להקוב", CYRILLIC, "script"),
]


@pytest.mark.parametrize(("text", "scripts"), GOOD)
def test_prompts_pass(text: str, scripts: tuple[str, ...]) -> None:
    assert find_flaw(text, marks=("<|im_end|>",), scripts=scripts) is None


@pytest.mark.parametrize(("text", "scripts", "flaw"), FLAWED)
def test_flaws_are_named(text: str, scripts: tuple[str, ...] | None, flaw: Flaw) -> None:
    assert find_flaw(text, marks=("<|im_end|>",), scripts=scripts) == flaw


def test_scripts_of_unknown_languages_are_not_checked() -> None:
    text = "Что это значит, скажите пожалуйста"
    assert find_flaw(text, marks=(), scripts=None) is None


def test_beginnings_are_written_in_their_language() -> None:
    for language in LANGUAGES:
        for opener in language.openers:
            letters = [one for one in opener.format(topic="") if one.isalpha()]
            scripts = {unicodedata.name(letter).split(" ")[0] for letter in letters}
            assert scripts <= set(language.scripts), (language.name, opener)
    for topic in TOPICS:
        assert find_flaw(f"Tell me about {topic}.", marks=(), scripts=("LATIN",)) is None


def test_figures_of_diversity() -> None:
    meter = DiversityMeter()
    assert meter.report().share_kept == 0
    for text in ("name the rivers", "name the lakes", "why is it so"):
        meter.keep(split_words(text))
    meter.reject("short")
    meter.reject("short")
    meter.reject("known")
    report = meter.report()
    assert (report.tries, report.kept, report.share_kept) == (6, 3, 0.5)
    assert report.flaws == {"known": 1, "short": 2}
    assert report.measured_prompts == 3
    assert report.mean_words == round(10 / 3, 4)
    assert report.distinct_1 == 0.8  # 8 different words of 10
    assert report.distinct_2 == round(6 / 7, 4)
    assert report.distinct_first_words == round(2 / 3, 4)
    assert report.type_token == 0.8


def test_type_token_does_not_fall_with_more_prompts() -> None:
    few, many = DiversityMeter(), DiversityMeter()
    for meter, rows in ((few, 100), (many, 1000)):
        for number in range(rows):
            meter.keep([f"w{(number * 20 + i) % 500}" for i in range(20)])
    assert few.report().type_token == many.report().type_token == 0.5
    assert few.report().distinct_1 > many.report().distinct_1
