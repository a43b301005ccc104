"""Conversations: every text is scrubbed, placeholders are stable, everything else stays."""

import json
from collections import Counter
from typing import Any

import pytest

from fledge.contracts.conversation import Answer, Conversation, Message, Origin
from fledge.contracts.data_settings import PRIVACY_TYPES, PrivacySettings
from fledge.contracts.errors import ConfigError
from fledge.contracts.toml_settings import read_settings
from fledge.data.privacy import Placeholders, Scrubbed, Scrubber

ORIGIN = Origin(source="s", licence="MIT", file="f.jsonl", row=1)
MAIL = "jo@example.org"
CARD = "4111 1111 1111 1111"


def conversation(*messages: Message, **others: Any) -> Conversation:
    return Conversation(id="s/1", messages=messages, origin=ORIGIN, **others)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def scrub(given: Conversation, **settings: Any) -> Scrubbed:
    return Scrubber(PrivacySettings(**settings)).scrub(given)


def scrubbed_messages(*messages: Message, **settings: Any) -> tuple[Message, ...]:
    result = scrub(conversation(*messages), **settings).conversation
    assert result is not None
    return result.messages


def test_one_value_has_one_placeholder_in_the_whole_conversation() -> None:
    messages = scrubbed_messages(
        user(f"I am {MAIL}, my colleague is ann@example.org"),
        {"role": "assistant", "content": "Hello JO@example.org", "reasoning_content": f"<{MAIL}>"},
        user("and ann@example.org?"),
    )
    assert messages[0]["content"] == "I am [EMAIL_1], my colleague is [EMAIL_2]"
    assert messages[1]["content"] == "Hello [EMAIL_1]"
    assert messages[1]["reasoning_content"] == "<[EMAIL_1]>"
    assert messages[2]["content"] == "and [EMAIL_2]?"


def test_numbers_written_differently_are_the_same_value() -> None:
    text = f"{CARD}, 4111111111111111, 4111-1111-1111-1111, ４１１１１１１１１１１１１１１１"
    assert scrubbed_messages(user(text))[0]["content"] == ", ".join(["[CARD_1]"] * 4)
    text = "phone +1 415 555 0132 or +1-415-555-0132, +1 415 555 0133"
    assert scrubbed_messages(user(text))[0]["content"] == "phone [PHONE_1] or [PHONE_1], [PHONE_2]"


def test_findings_are_counted_by_type() -> None:
    result = scrub(conversation(user(f"{MAIL} {MAIL} {CARD}"), user("no")))
    assert result.found == Counter({"email": 2, "card": 1})


def test_scrubbing_twice_changes_nothing() -> None:
    given = conversation(user(f"{MAIL}, {CARD}, DE89370400440532013000, +49 30 901820"))
    once = scrub(given).conversation
    assert once is not None
    again = scrub(once)
    assert again.conversation is once
    assert not again.found


def test_numbers_of_placeholders_in_the_text_are_not_given_again() -> None:
    messages = scrubbed_messages(user(f"[EMAIL_3] wrote to {MAIL}"))
    assert messages[0]["content"] == "[EMAIL_3] wrote to [EMAIL_4]"


def test_a_clean_conversation_is_returned_as_it_is() -> None:
    given = conversation(user("What is 1.2.3.4?"), {"role": "assistant", "content": None})
    assert scrub(given).conversation is given


def test_types_are_dropped_or_kept_as_the_settings_say() -> None:
    given = conversation(user(f"{MAIL} and {CARD}"))
    dropped = scrub(given, actions={"card": "drop"})
    assert dropped.conversation is None
    assert dropped.found == Counter({"email": 1, "card": 1})
    kept = scrub(given, actions={"card": "keep"}).conversation
    assert kept is not None
    assert kept.messages[0]["content"] == f"[EMAIL_1] and {CARD}"
    assert scrub(given, default="keep", actions={"email": "replace"}).found["card"] == 1
    assert scrub(given, default="drop").conversation is None
    off = scrub(given, enabled=False)
    assert off.conversation is given
    assert not off.found


def call(arguments: Any) -> Message:
    function = {"name": "send", "arguments": arguments}
    calls = [{"id": "call_4111111111111111", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def scrubbed_arguments(arguments: Any) -> Any:
    (message,) = scrubbed_messages(call(arguments))
    assert message["tool_calls"][0]["id"] == "call_4111111111111111"
    assert message["tool_calls"][0]["function"]["name"] == "send"
    return message["tool_calls"][0]["function"]["arguments"]


def test_arguments_in_json_stay_json_and_change_only_in_strings() -> None:
    text = '{ "to":"jo@example.org",\t"n": 4111111111111111, "x": 1.50, "b": "a\\u00e9\\n" }'
    assert scrubbed_arguments(text) == text.replace(MAIL, "[EMAIL_1]")
    nested = '{"a": [{"jo@example.org": "x \\"jo@example.org\\" \\\\ ü"}], "big": 1e400}'
    changed = scrubbed_arguments(nested)
    assert changed == nested.replace('x \\"jo@example.org', 'x \\"[EMAIL_1]')
    assert list(json.loads(changed)["a"][0]) == [MAIL]


def test_the_name_of_a_field_says_what_its_value_is() -> None:
    text = '{"phone": "4155550132", "id": "4155550132", "ssn": "536228613", "n": ["536228613"]}'
    expected = (
        '{"phone": "[PHONE_1]", "id": "4155550132", "ssn": "[NATIONAL_ID_1]", "n": ["536228613"]}'
    )
    assert scrubbed_arguments(text) == expected
    assert scrubbed_arguments({"userPhone": "4155550132"}) == {"userPhone": "[PHONE_1]"}
    assert scrubbed_arguments({"phone": ["4155550132"], "n": 4155550132}) == {
        "phone": ["[PHONE_1]"],
        "n": 4155550132,
    }


def test_arguments_that_are_no_json_are_scrubbed_as_prose() -> None:
    assert scrubbed_arguments(f"{{to: {MAIL}") == "{to: [EMAIL_1]"
    assert scrubbed_arguments(f"to {MAIL}") == "to [EMAIL_1]"
    deep = "[" * 100_000
    assert scrubbed_arguments(f"{deep} {MAIL}") == f"{deep} [EMAIL_1]"


def test_a_lone_surrogate_in_json_stays_an_escape() -> None:
    changed = scrubbed_arguments('{"x": "\\ud83d jo@example.org ü"}')
    assert json.loads(changed) == {"x": "\ud83d [EMAIL_1] ü"}
    assert changed.encode("utf-8")


def test_results_of_tools_are_scrubbed_as_json_or_prose() -> None:
    result = {
        "role": "tool",
        "tool_call_id": "c1",
        "name": "find",
        "content": f'{{"mail": "{MAIL}"}}',
    }
    (message,) = scrubbed_messages(result)
    assert message == {**result, "content": '{"mail": "[EMAIL_1]"}'}
    (message,) = scrubbed_messages({**result, "content": f"found {MAIL}"})
    assert message["content"] == "found [EMAIL_1]"


def test_contents_in_parts_are_scrubbed() -> None:
    (message,) = scrubbed_messages({"role": "user", "content": [{"type": "text", "text": MAIL}]})
    assert message["content"] == [{"type": "text", "text": "[EMAIL_1]"}]


def test_definitions_of_tools_are_scrubbed_where_they_speak_or_give_examples() -> None:
    properties = {
        "mail": {"type": "string", "description": f"as {MAIL}", "examples": ["ann@example.org"]},
        "name": {"type": "string", "default": MAIL, "pattern": "a@example.org"},
        "who": {"type": "object", "example": {"name": "bob@example.org", "phone": "4155550132"}},
    }
    function = {
        "name": "jo@example.org",
        "description": f"Ask {MAIL}.",
        "parameters": {"type": "object", "properties": properties, "required": ["mail"]},
    }
    given = conversation(user("hi"), tools=({"type": "function", "function": function},))
    result = scrub(given).conversation
    assert result is not None
    changed = result.tools[0]["function"]
    assert changed["name"] == "jo@example.org"
    assert changed["description"] == "Ask [EMAIL_1]."
    assert changed["parameters"]["required"] == ["mail"]
    assert changed["parameters"]["properties"] == {
        "mail": {"type": "string", "description": "as [EMAIL_1]", "examples": ["[EMAIL_2]"]},
        "name": {"type": "string", "default": "[EMAIL_1]", "pattern": "a@example.org"},
        "who": {"type": "object", "example": {"name": "[EMAIL_3]", "phone": "[PHONE_1]"}},
    }


def test_ids_of_a_changed_answer_are_forgotten() -> None:
    answers = tuple(
        Answer(
            message=i, model="m", temperature=0.0, seed=0, finish_reason="stop", token_ids=(1, 2)
        )
        for i in (1, 2)
    )
    said = [{"role": "assistant", "content": text} for text in ("plain", MAIL)]
    result = scrub(conversation(user("?"), *said, answers=answers)).conversation
    assert result is not None
    assert [answer.token_ids for answer in result.answers] == [(1, 2), None]


def test_an_unknown_type_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"actions names 'emial'.*did you mean 'email'\?"):
        PrivacySettings(actions={"emial": "drop"})
    with pytest.raises(ConfigError, match="known are email, phone, card"):
        PrivacySettings(actions={"zzz": "drop"})
    with pytest.raises(
        ConfigError, match=r"privacy\.actions\.email is 'delete'; it must be one of"
    ):
        read_settings(PrivacySettings, {"actions": {"email": "delete"}}, where="privacy")
    settings = PrivacySettings(actions=dict.fromkeys(PRIVACY_TYPES, "keep"))
    assert settings.action("iban") == "keep"
    assert PrivacySettings().action("iban") == "replace"


def test_aliases_share_a_placeholder() -> None:
    placeholders = Placeholders()
    placeholders.link("name", {"Ann": "Ann Lee", "Lee": "Ann Lee"})
    assert placeholders.give("name", "Ann  Lee") == "[NAME_1]"
    assert placeholders.give("name", "Ann") == placeholders.give("name", "Lee") == "[NAME_1]"
    assert placeholders.give("name", "Bob") == "[NAME_2]"
    assert placeholders.give("secret", "Ab") != placeholders.give("secret", "aB")
