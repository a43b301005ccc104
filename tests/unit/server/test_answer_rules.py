"""Forms and forced calls, from the request to the parts of an answer, on real tokenizers.

What an answer may be is asked of the grammar itself; a random target then has to keep to it.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fledge import Engine, SamplingParams
from fledge.models.tokenizer import TargetTokenizer
from fledge.server.answer_rules import rules_of
from fledge.server.api_errors import InvalidRequestError
from fledge.server.api_requests import ChatRequest, CompletionRequest
from fledge.server.call_reader import whole_calls
from fledge.server.message_parts import Parts
from fledge.server.prompts import PromptReader
from fledge.testing import target_of, tiny_model, tiny_tokenizer

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
NEW_MISTRAL = "{% if tools %}[TOOL_CALLS]name[ARGS]{}{% endif %}{{ messages[0].content }}"
SPECIALS = {
    "hermes_tools": ["<tool_call>", "</tool_call>"],
    "qwen3": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "llama31_tools": ["<|python_tag|>"],
    "mistral_tools": ["[TOOL_CALLS]"],
    "new_mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "chatml": [],
    "opened_think": ["<think>", "</think>"],
}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
DIGIT_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "digit", "schema": DIGIT, "strict": True},
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/digit"}, "b": DIGIT},
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"digit": DIGIT},
        },
    },
}
PICK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "pick_one",
        "parameters": {
            "properties": {"colour": {"enum": ["red", "grün"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


@cache
def parts_of(template: str, has_special_marks: bool) -> tuple[Engine, PromptReader]:
    inner = tiny_tokenizer()
    inner.chat_template = NEW_MISTRAL
    if template != "new_mistral":
        inner.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    if has_special_marks:
        inner.add_special_tokens({"additional_special_tokens": SPECIALS[template]})
    tokenizer = TargetTokenizer(inner)
    model = tiny_model("llama", vocab_size=len(inner))
    return Engine(target_of(model, tokenizer)), PromptReader(tokenizer, tokenizer)


def chat_of(**fields: Any) -> ChatRequest:
    message = {"role": "user", "content": "Go"}
    return ChatRequest.model_validate({"model": "m", "messages": [message], **fields})


def read(
    template: str, special: bool, chat: ChatRequest, text: str, prompt: str = "Go"
) -> Parts | None:
    """The parts of an answer, one token at a time; None when the rules do not allow it."""
    engine, reader = parts_of(template, special)
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    reasoning = reader.reasoning_after(tokenizer.encode_all([prompt])[0])
    rules = rules_of(chat, reader.marks, reasoning)
    ids = tokenizer.encode_all([text])[0]
    assert rules.grammar is not None
    state = engine.grammars.start(rules.grammar)
    has_ended = [state.take(token_id) for token_id in ids]
    if state.error is not None or any(has_ended[:-1]) or not state.matcher.is_accepting():
        return None
    shown = frozenset(rules.shown_token_ids)
    splitting = reader.splitting(chat, reasoning)
    if splitting is None:
        return Parts(content=tokenizer.decode(ids, shown=shown))
    splitter, whole = splitting(), Parts()
    for place, token_id in enumerate(ids, start=1):
        piece = tokenizer.decode([token_id], shown=shown)
        parts = splitter.feed(piece, is_last=place == len(ids))
        whole.content += parts.content
        whole.reasoning += parts.reasoning
        whole.calls += parts.calls
    return whole


def called(parts: Parts | None) -> list[tuple[str, Any]]:
    assert parts is not None
    assert not parts.content
    functions = [call["function"] for call in whole_calls(parts.calls)]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


SPECIAL = pytest.mark.parametrize("special", [True, False], ids=["tokens", "texts"])
ONE_ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ONE_PICK = '{"name": "pick_one", "arguments": {"colour": "red"}}'
ANSWERS = {
    "hermes_tools": (
        f"<tool_call>\n{ONE_ADD}\n</tool_call>",
        f"\n<tool_call>\n{ONE_PICK}\n</tool_call>",
        "",
    ),
    "llama31_tools": (
        ONE_ADD.replace("arguments", "parameters"),
        "; " + ONE_PICK.replace("arguments", "parameters"),
        "",
    ),
    "mistral_tools": (f"[TOOL_CALLS][{ONE_ADD}", f", {ONE_PICK}", "]"),
    "new_mistral": (
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
        '[TOOL_CALLS]pick_one[ARGS]{"colour": "red"}',
        "",
    ),
}


@SPECIAL
@pytest.mark.parametrize("template", ANSWERS)
def test_forced_calls_in_every_format(template: str, special: bool) -> None:
    """They are read back whether the marks are special tokens or not."""
    first, second, end = ANSWERS[template]
    chat = chat_of(tools=[ADD, PICK], tool_choice="required")
    add, pick = ("add", {"a": 1, "b": 2}), ("pick_one", {"colour": "red"})
    assert called(read(template, special, chat, first + end)) == [add]
    assert called(read(template, special, chat, first + second + end)) == [add, pick]
    for wrong in (
        "It is three.",
        first.replace("2", "22") + end,
        first.replace("add", "sub") + end,
    ):
        assert read(template, special, chat, wrong) is None
    single = chat_of(tools=[ADD, PICK], tool_choice="required", parallel_tool_calls=False)
    assert called(read(template, special, single, first + end)) == [add]
    assert read(template, special, single, first + second + end) is None
    named = chat_of(
        tools=[ADD, PICK], tool_choice={"type": "function", "function": {"name": "add"}}
    )
    assert called(read(template, special, named, first + end)) == [add]
    assert read(template, special, named, first + second + end) is None


@SPECIAL
def test_forms_come_behind_the_reasoning(special: bool) -> None:
    chat = chat_of(response_format=DIGIT_FORMAT)
    for text, content in (("<think>\nhm {\n</think>\n\n7", "7"), ("7", "7")):
        parts = read("qwen3", special, chat, text)
        assert parts is not None
        assert (parts.content, parts.reasoning) == (content, "hm {" if "hm" in text else "")
    for wrong in ("seven", "<think>\nhm", "hm</think>\n\n7", "<think>hm</think>\n\nseven"):
        assert read("qwen3", special, chat, wrong) is None
    opened = read("opened_think", special, chat, "hm\n</think>\n\n7", "Go<think>\n")
    assert opened is not None
    assert (opened.content, opened.reasoning) == ("7", "hm")
    assert read("opened_think", special, chat, "7", "Go<think>\n") is None
    closed = read("qwen3", special, chat, "7", "Go<think>\n\n</think>\n\n")
    assert closed is not None
    assert closed.content == "7"


@SPECIAL
def test_forced_calls_come_behind_the_reasoning(special: bool) -> None:
    chat = chat_of(tools=[ADD], tool_choice="required")
    text = f"<think>\nadd\n</think>\n\n<tool_call>\n{ONE_ADD}\n</tool_call>"
    parts = read("qwen3", special, chat, text)
    assert called(parts) == [("add", {"a": 1, "b": 2})]
    assert parts is not None
    assert parts.reasoning == "add"


def test_calls_or_a_form_where_both_may_be() -> None:
    chat = chat_of(tools=[ADD], response_format=DIGIT_FORMAT)
    assert called(read("hermes_tools", True, chat, ANSWERS["hermes_tools"][0]))
    content = read("hermes_tools", True, chat, "7")
    assert content is not None
    assert content.content == "7"
    assert read("hermes_tools", True, chat, "seven") is None


def test_random_target_keeps_to_it() -> None:
    engine, reader = parts_of("hermes_tools", True)
    chat = chat_of(tools=[PICK], tool_choice="required", parallel_tool_calls=False)
    rules = rules_of(chat, reader.marks, "none")
    params = rules.applied_to(SamplingParams(max_tokens=200, temperature=0.7, seed=4))
    (said,) = engine.generate([[70, 71]], params)
    splitting = reader.splitting(chat, "none")
    assert splitting is not None
    parts = splitting().feed(said.text, is_last=True)
    ((name, arguments),) = called(parts)
    assert name == "pick_one"
    jsonschema.validate(arguments, PICK["function"]["parameters"])
    assert said.finish_reason == "stop"


def test_special_tokens_are_seen_only_when_they_matter() -> None:
    _, reader = parts_of("qwen3", True)
    marks = reader.marks
    ids = {mark: marks.special_tokens[mark] for mark in SPECIALS["qwen3"]}
    thinking = {ids["<think>"], ids["</think>"]}
    plain = rules_of(chat_of(), marks, "possible")
    assert set(plain.shown_token_ids) == thinking
    calling = rules_of(chat_of(tools=[ADD]), marks, "possible")
    assert set(calling.shown_token_ids) == set(ids.values())
    silent = rules_of(chat_of(tools=[ADD], tool_choice="none"), marks, "possible")
    assert set(silent.shown_token_ids) == thinking
    all_shown = rules_of(chat_of(skip_special_tokens=False), marks, "none")
    assert set(all_shown.shown_token_ids) == set(marks.special_tokens.values())
    completion = CompletionRequest.model_validate({"model": "m", "prompt": "x"})
    assert rules_of(completion, marks, "none") == (None, ())


def test_special_tokens_are_written() -> None:
    engine, reader = parts_of("qwen3", True)
    ids = [reader.marks.special_tokens[mark] for mark in ("<tool_call>", "<think>")]
    bias = dict.fromkeys(ids, 100.0)
    params = {"max_tokens": 4, "logit_bias": bias}
    (hidden,) = engine.generate([[70]], SamplingParams(**params))
    assert hidden.text == ""
    (shown,) = engine.generate([[70]], SamplingParams(**params, shown_token_ids=(ids[1],)))
    assert set(shown.text.replace("<think>", "|")) <= {"|"}
    assert shown.token_ids == hidden.token_ids


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "names 'sub', which is none of the tools",
            "tool_choice",
        ),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "'sometimes'", "tool_choice"),
        ({"response_format": {"type": "xml"}}, "type 'xml' is not supported", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "needs json_schema", "response_format"),
        ({"guided_choice": []}, "must name texts", "guided_choice"),
        ({"guided_json": "{"}, "is no JSON", "guided_json"),
        ({"guided_json": "[]"}, "an object", "guided_json"),
        ({"guided_regex": "a" * 70_000}, "make it smaller", "guided_regex"),
        (
            {"guided_regex": "a", "structured_outputs": {"choice": ["b"]}},
            "guided_regex and structured_outputs.choice are given",
            "guided_regex",
        ),
    ],
)
def test_wrong_wishes(fields: dict[str, Any], message: str, param: str) -> None:
    _, reader = parts_of("hermes_tools", False)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        rules_of(chat_of(**fields), reader.marks, "none")
    assert caught.value.param == param


def test_template_without_tools_cannot_be_forced() -> None:
    _, reader = parts_of("chatml", False)
    with pytest.raises(InvalidRequestError, match="template teaches none"):
        rules_of(chat_of(tools=[ADD], tool_choice="required"), reader.marks, "none")


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_choice": ["yes", 'no "\n"']}, {"yes", 'no "\n"'}),
        ({"guided_regex": "a/b|c\\/d"}, {"a/b", "c/d"}),
        ({"guided_json": {"enum": [1, "x"]}}, {"1", '"x"'}),
        ({"structured_outputs": {"json": '{"const": true}'}}, {"true"}),
        ({"guided_grammar": 'start: a "!"\na: "x" | "y"'}, {"x!", "y!"}),
    ],
)
def test_other_ways_to_ask_for_a_form(fields: dict[str, Any], allowed: set[str]) -> None:
    chat = chat_of(**fields)
    for text in allowed:
        parts = read("hermes_tools", False, chat, text)
        assert parts is not None
        assert parts.content == text
        assert read("hermes_tools", False, chat, text + "?") is None
        if "guided_grammar" not in fields:
            thinking = read("opened_think", True, chat, f"hm</think>{text}", "<think>")
            assert thinking is not None
            assert thinking.content == text
