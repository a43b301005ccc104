"""What is asked about a conversation, and what comes out of it."""

from collections import Counter
from typing import Any

import pytest

from fledge.contracts.conversation import Conversation, Message
from fledge.contracts.regenerate_settings import RegenerateSettings
from fledge.data.regenerate.dialogue import Dialogue, Dropped, Question, Reply
from tests.unit.data.regenerate_support import TOOLS, call, row, say, simple_rows

SYSTEM = say("system", "be brief")
USER, USER_2 = say("user", "one?"), say("user", "two?")
OLD, OLD_2 = say("assistant", "old one"), say("assistant", "old two")
OLD_CALL = say("assistant", None, tool_calls=[call("weather", "old")])
RESULT = say("tool", "warm", tool_call_id="old")


def dialogue(*messages: Message, **settings: Any) -> Dialogue:
    one = row(1, *messages, tools=TOOLS)
    return Dialogue(0, one, RegenerateSettings(**settings), "tiny")


def reply(content: str | None = "new", finish: Any = "stop", *calls: str) -> Reply:
    message = say("assistant", content)
    if calls:
        message["tool_calls"] = [call(name, f"new{n}") for n, name in enumerate(calls)]
    return Reply(message=message, finish_reason=finish)


def asked(one: Dialogue) -> Question:
    assert one.question is not None
    return one.question


def outcome(one: Dialogue) -> Conversation:
    found = one.outcome()
    assert isinstance(found, Conversation)
    return found


LAST = {
    "an answer is dropped": ([USER, OLD], [USER]),
    "earlier answers stay": ([SYSTEM, USER, OLD, USER_2, OLD_2], [SYSTEM, USER, OLD, USER_2]),
    "a question that waits": ([USER, OLD, USER_2], [USER, OLD, USER_2]),
    "a turn of two messages": ([USER, OLD, OLD_2], [USER]),
    "after a tool": ([USER, OLD_CALL, RESULT, OLD], [USER, OLD_CALL, RESULT]),
    "a tool result that waits": ([USER, OLD_CALL, RESULT], [USER, OLD_CALL, RESULT]),
    "a call without result": ([USER, OLD_CALL], [USER]),
    "something behind the answer": ([USER, OLD, SYSTEM], [USER]),
    "a system prompt in between": ([USER, SYSTEM, OLD], [USER, SYSTEM]),
    "a greeting": ([OLD, USER, OLD_2], [OLD, USER]),
}


@pytest.mark.parametrize(("messages", "given"), LAST.values(), ids=LAST.keys())
def test_the_last_turn_is_asked_again(messages: list[Message], given: list[Message]) -> None:
    one = dialogue(*messages)
    assert list(asked(one).messages) == given
    assert asked(one).tools == TOOLS
    one.take(reply())
    assert one.question is None
    found = outcome(one)
    assert list(found.messages) == [*given, say("assistant", "new")]
    assert [answer.message for answer in found.answers] == [len(given)]


UNANSWERED = {
    "prompts of several turns": ([USER, USER_2], [USER]),
    "two questions, one answer": ([USER, USER_2, OLD], [USER]),
    "after an earlier answer": ([USER, OLD, USER, USER_2, OLD_2], [USER, OLD, USER]),
}


@pytest.mark.parametrize(("messages", "given"), UNANSWERED.values(), ids=UNANSWERED.keys())
def test_user_messages_in_a_row_are_asked_one_by_one(
    messages: list[Message], given: list[Message]
) -> None:
    one = dialogue(*messages)
    assert one.num_turns == 2
    assert list(asked(one).messages) == given
    one.take(reply("first"))
    assert list(asked(one).messages) == [*given, say("assistant", "first"), USER_2]
    one.take(reply("second"))
    assert [answer.message for answer in outcome(one).answers] == [len(given), len(given) + 2]


@pytest.mark.parametrize("turns", ["last", "all"])
@pytest.mark.parametrize("messages", [[], [SYSTEM], [SYSTEM, OLD], [OLD]])
def test_nothing_to_ask(messages: list[Message], turns: str) -> None:
    one = dialogue(*messages, turns=turns)
    assert one.is_over
    assert one.question is None
    assert one.outcome() == Dropped("nothing to ask")


def test_all_turns_are_asked_in_order() -> None:
    one = dialogue(SYSTEM, USER, OLD, USER_2, OLD_2, turns="all")
    assert list(asked(one).messages) == [SYSTEM, USER]
    first_seed = asked(one).seed
    one.take(reply("first"))
    assert list(asked(one).messages) == [SYSTEM, USER, say("assistant", "first"), USER_2]
    assert (asked(one).turn, asked(one).seed == first_seed) == (1, False)
    second_seed = asked(one).seed
    one.take(reply("second"))
    found = outcome(one)
    assert [message["content"] for message in found.messages] == [
        "be brief",
        "one?",
        "first",
        "two?",
        "second",
    ]
    assert [answer.message for answer in found.answers] == [2, 4]
    assert [answer.seed for answer in found.answers] == [first_seed, second_seed]
    assert not one.is_cut


def test_a_greeting_and_its_tools_are_left_out_of_all_turns() -> None:
    one = dialogue(OLD_CALL, RESULT, USER, OLD, USER_2, turns="all")
    assert one.num_turns == 2
    assert list(asked(one).messages) == [USER]
    one.take(reply("first"))
    assert list(asked(one).messages) == [USER, say("assistant", "first"), USER_2]


def test_recorded_results_go_to_the_new_calls() -> None:
    calls = say("assistant", None, tool_calls=[call("weather", "a"), call("clock", "b")])
    results = [say("tool", "warm", tool_call_id="a"), say("tool", "noon", tool_call_id="b")]
    one = dialogue(USER, calls, *results, OLD, turns="all")
    one.take(reply(None, "tool_calls", "clock", "weather"))
    given = asked(one).messages[2:]
    assert [(m["content"], m["tool_call_id"]) for m in given] == [
        ("warm", "new1"),
        ("noon", "new0"),
    ]
    one.take(reply())
    assert not one.is_cut


@pytest.mark.parametrize("extra", [{"name": "weather"}, {}])
def test_results_without_ids_are_known_by_name_or_order(extra: dict[str, str]) -> None:
    one = dialogue(USER, OLD_CALL, say("tool", "warm", **extra), OLD, turns="all")
    one.take(reply(None, "tool_calls", "weather"))
    assert asked(one).messages[-1]["tool_call_id"] == "new0"


UNFIT = {
    "no call": reply(),
    "another tool": reply(None, "tool_calls", "clock"),
    "one call too many": reply(None, "tool_calls", "weather", "weather"),
    "cut": reply("ne", "length"),
}


@pytest.mark.parametrize("first", UNFIT.values(), ids=UNFIT.keys())
def test_the_conversation_ends_where_results_do_not_fit(first: Reply) -> None:
    one = dialogue(USER, OLD_CALL, RESULT, OLD, USER_2, OLD_2, turns="all")
    one.take(first)
    assert one.is_over
    assert one.is_cut
    assert list(outcome(one).messages) == [USER, first.message]


def test_the_conversation_ends_at_a_call_without_result() -> None:
    one = dialogue(USER, OLD, USER_2, OLD_2, turns="all")
    one.take(reply(None, "tool_calls", "weather"))
    assert one.is_over
    assert outcome(one).answers[0].finish_reason == "tool_calls"


def test_cut_answers_are_kept_or_dropped() -> None:
    for keep, kept in ((True, 1), (False, 0)):
        one = dialogue(USER, OLD, keep_truncated=keep)
        one.take(reply("ne", "length"))
        assert isinstance(one.outcome(), Conversation) == kept
    assert one.outcome() == Dropped("truncated")
    filtered = dialogue(USER, OLD)
    filtered.take(reply("", "content_filter"))
    assert filtered.outcome() == Dropped("content_filter")


def test_temperatures_are_even_and_depend_on_id_and_seed_only() -> None:
    settings = RegenerateSettings(temperatures=(0.0, 0.5, 1.0))

    def chosen(settings: RegenerateSettings) -> list[float]:
        dialogues = [Dialogue(n, one, settings, "m") for n, one in enumerate(simple_rows(600))]
        return [asked(one).temperature for one in dialogues]

    assert chosen(settings) == chosen(settings)
    assert all(150 < count < 250 for count in Counter(chosen(settings)).values())
    assert chosen(settings) != chosen(RegenerateSettings(temperatures=(0.0, 0.5, 1.0), seed=1))
    one = Dialogue(7, simple_rows(1)[0], settings, "m")
    assert (asked(one).temperature, asked(one).seed) == (1.0, 828092962)
