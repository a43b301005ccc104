"""Variants of a prompt: other numbers of the same size and form, other names and things."""

import re

import pytest

from fledge.contracts.conversation import Conversation, Message, Origin, asked_id, copy_id
from fledge.data.variants import make_variants
from fledge.store.row_hash import conversation_hash

ORIGIN = Origin(source="math", licence="MIT", file="math.jsonl", row=7)


def row(*texts: str) -> Conversation:
    messages: list[Message] = [{"role": "user", "content": text} for text in texts]
    return Conversation(id="math/7", messages=tuple(messages), origin=ORIGIN)


def texts_of(asked: Conversation, count: int = 8, seed: int = 0) -> list[str]:
    return [variant.messages[-1]["content"] for variant in make_variants(asked, count, seed)]


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("He has 48 clips.", r"He has [1-9]\d clips\."),
        ("It costs $1,250 in all.", r"It costs \$[1-9],\d(0|5)0 in all\."),
        ("A pound is $3.50, he said.", r"A pound is \$[1-9]\.\d(0|5), he said\."),
        ("Add 0.5 litres", r"Add 0\.[1-9] litres"),
        ("25% of them, 80 percent of us", r"\d\d% of them, \d\d percent of us"),
        ("a 10-year-old in 12-14 days", r"a [1-9]\d-year-old in [1-9]\d-[1-9]\d days"),
    ],
)
def test_numbers_keep_size_and_form(text: str, pattern: str) -> None:
    found = texts_of(row(text))
    assert found
    assert all(re.fullmatch(pattern, one) for one in found), found
    assert text not in found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "text",
    ["In 1998", "the 3rd of 1", "2/3 of it", "at 7:30", "B12 and 5kg", "0 left", "no number",
     "version 1.2.3", "room 007", "COVID-19", "id 12345678901234", "100%", "0.0 metres",
     "at 10 am", "2 p.m", "4 o'clock", "on May 12", "Sept. 30", "2024-05-16", "2024-12-16"],
)  # fmt: skip
def test_what_is_no_quantity_stays(text: str) -> None:
    assert texts_of(row(text)) == []
    (changed, *_) = texts_of(row(f"{text}, and 60 sheep."))
    assert changed.startswith(text)
    assert "60 sheep" not in changed


def test_equal_numbers_stay_equal_and_others_different() -> None:
    for text in texts_of(row("1,000 here, 1000 there, 20 and 30 more"), 30):
        first, second, *others = re.findall(r"[\d,]*\d", text)
        assert first.replace(",", "") == second != first
        assert len({second, *others}) == 3


def test_what_stays_in_one_place_may_change_in_another() -> None:
    for text in texts_of(row("At 8 pm in 2000 he had 8 sheep and $2000.")):
        assert re.fullmatch(r"At 8 pm in 2000 he had [4-9] sheep and \$[1-9]000\.", text), text
        assert "8 sheep" not in text


def test_no_share_is_above_all() -> None:
    found = texts_of(row("He had 75 sheep and sold 75% of them, 9 of 10."), 30)
    assert found
    assert all(int(re.findall(r"(\d+)%", text)[0]) < 100 for text in found)
    assert texts_of(row("He had 100 sheep and sold 100% of them.")) == []


def test_names_are_swapped_for_names_of_the_same_kind() -> None:
    for text in texts_of(row("Tom gave Anna 12 of Tom's sheep. Did Anna thank him?")):
        found = re.fullmatch(r"(\w+) gave (\w+) \d\d of \1's sheep\. Did \2 thank him\?", text)
        assert found is not None, text
        assert {found[1], found[2]}.isdisjoint({"Tom", "Anna"})
        assert found[1] != found[2]


def test_a_third_of_the_names_are_names_that_nobody_has() -> None:
    found = texts_of(row("Tom has 480 of 960 sheep, and Tom's brother 120."), 1500)
    names = [text.partition(" ")[0] for text in found]
    assert all(f"and {name}'s brother" in text for name, text in zip(names, found, strict=True))
    known = {name for name in names if names.count(name) > 1}
    invented = [name for name in names if name not in known]
    assert 0.28 < len(invented) / len(names) < 0.38
    assert all(re.fullmatch(r"[A-Z][a-z]{2,}", name) for name in names)


def test_things_are_swapped_for_things_of_the_same_kind() -> None:
    asked = row("A Baker has 3 boxes of apples, 2 in the last box. One apple is bad, 4 CARS left.")
    for text in texts_of(asked, 20):
        found = re.fullmatch(
            r"A ([A-Z]\w+) has \d (\w+) of (\w+), \d in the last (\w+)\. One (\w+) is bad, "
            r"\d ([A-Z]+) left\.",
            text,
        )
        assert found is not None, text
        assert {"Baker", "boxes", "apples", "box", "apple", "CARS"}.isdisjoint(found.groups())
        assert found[2].startswith(found[4].removesuffix("f"))
        assert found[3][0] in "aeo"
        assert found[3] == f"{found[5]}s"


def test_things_stay_different_and_parts_of_words_stay() -> None:
    for text in texts_of(row("5 cows and 7 goats, carpets, a cow-bell, the cow's tail"), 30):
        first, second = re.findall(r"\d (\w+)", text)
        assert first != second
        assert {first, second}.isdisjoint({"cows", "goats"})
        assert "carpets, a cow-bell" in text
        assert f"the {first.removesuffix('s')}'s tail" in text or first in ("puppies", "goldfish")


def test_a_seed_and_a_row_decide() -> None:
    asked = row("48 clips and 24 boxes for 12 people")
    assert texts_of(asked) == texts_of(asked)
    assert texts_of(asked)[:3] == texts_of(asked, 3)
    assert texts_of(asked) != texts_of(asked, seed=1)


def test_there_are_no_more_than_other_numbers() -> None:
    found = texts_of(row("He has 2 sheep."), 50)
    assert sorted(found) == [f"He has {number} sheep." for number in range(3, 7)]


def test_only_what_opens_a_conversation_is_rewritten() -> None:
    messages: list[Message] = [
        {"role": "system", "content": "Answer in 20 words."},
        {"role": "user", "content": "What is 15 and 30?"},
        {"role": "assistant", "content": "45"},
        {"role": "user", "content": "And 10 more?"},
    ]
    asked = Conversation(id="math/7", messages=tuple(messages), origin=ORIGIN)
    (variant,) = make_variants(asked, 1, 0)
    assert variant.messages[0] == messages[0]
    assert len(variant.messages) == 2
    assert variant.messages[1]["content"] != messages[1]["content"]
    assert variant.origin == ORIGIN


def test_numbers_are_the_same_in_all_turns() -> None:
    (variant,) = make_variants(row("I had 40 sheep.", "Now 40 more."), 1, 0)
    first, second = (re.findall(r"\d+", message["content"]) for message in variant.messages)
    assert first == second != ["40"]


def test_variants_of_a_row_are_held_out_together() -> None:
    ids = [variant.id for variant in make_variants(row("40 sheep and 30 geese"), 3, 0)]
    assert ids == ["math/7+1", "math/7+2", "math/7+3"]
    assert asked_id(copy_id(ids[1], 2)) == "math/7"
    assert {conversation_hash(one) for one in ids} == {conversation_hash("math/7~2")}
    assert conversation_hash("math/7") != conversation_hash("math/71")
