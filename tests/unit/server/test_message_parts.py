"""Answers taken apart, however they arrive."""

import json
from pathlib import Path
from typing import Any

import pytest

from fledge.server.call_formats import format_of
from fledge.server.call_reader import whole_calls
from fledge.server.message_parts import MessageSplitter, Parts

NAMES = ("get_time", "add")
HERMES = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "é"}}\n</tool_call>'
TIME = ("get_time", {"zone": "é"})
ADD = ("add", {"a": 1, "b": [2]})


def split(text: str, portion: int, **options: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content and calls of a text that arrives in portions of this size."""
    settings = {"can_think": False, "is_thinking": False, "calls": None, "tool_names": NAMES}
    splitter = MessageSplitter(**{**settings, **options})
    whole = Parts()
    pieces = [text[start : start + portion] for start in range(0, len(text), portion)]
    for number, piece in enumerate(pieces or [""], start=1):
        parts = splitter.feed(piece, is_last=number >= len(pieces))
        whole.content += parts.content
        whole.reasoning += parts.reasoning
        whole.calls += parts.calls
    assert splitter.has_calls == bool(whole.calls)
    indices = [delta.index for delta in whole.calls]
    assert indices == sorted(indices)
    return whole.reasoning, whole.content, [read(call) for call in whole_calls(whole.calls)]


def read(call: dict[str, Any]) -> tuple[str, Any]:
    assert call["type"] == "function"
    return call["function"]["name"], json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("portion", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("plain\n\n", {}, ("", "plain\n\n", [])),
        ("", {}, ("", "", [])),
        ("<think>\nhm\n\n</think>\n\nyes", {"can_think": True}, ("hm", "yes", [])),
        ("hm\n</think>\n\nyes\n", {"can_think": True, "is_thinking": True}, ("hm", "yes\n", [])),
        ("hm, cut", {"can_think": True, "is_thinking": True}, ("hm, cut", "", [])),
        ("<thin", {"can_think": True}, ("", "<thin", [])),
        ("no thoughts </think> here", {"can_think": True}, ("", "no thoughts </think> here", [])),
        ("<think>not taken apart</think>", {}, ("", "<think>not taken apart</think>", [])),
        (HERMES, {"calls": "hermes"}, ("", "", [TIME])),
        (HERMES + "\n" + HERMES, {"calls": "hermes"}, ("", "", [TIME, TIME])),
        ("Let me see.\n" + HERMES, {"calls": "hermes"}, ("", "Let me see.", [TIME])),
        ("a < b <tool", {"calls": "hermes"}, ("", "a < b <tool", [])),
        (HERMES, {}, ("", HERMES, [])),
        (
            "<tool_call>{oops}</tool_call>",
            {"calls": "hermes"},
            ("", "<tool_call>{oops}</tool_call>", []),
        ),
        (HERMES.removesuffix("</tool_call>"), {"calls": "hermes"}, ("", "", [TIME])),
        (
            "<think>\nuse it\n</think>\n\n" + HERMES,
            {"can_think": True, "calls": "hermes"},
            ("use it", "", [TIME]),
        ),
        (
            '{"name": "get_time", "parameters": {"zone": "é"}}',
            {"calls": "llama3"},
            ("", "", [TIME]),
        ),
        (
            '<|python_tag|>{"name": "get_time", "parameters": {"zone": "é"}}; '
            '{"name": "add", "parameters": {"a": 1, "b": [2]}}',
            {"calls": "llama3"},
            ("", "", [TIME, ADD]),
        ),
        ('{"name": "other", "parameters": {}}', {"calls": "llama3"}, None),
        ('{"just": "JSON"}', {"calls": "llama3"}, None),
        ("It is noon.", {"calls": "llama3"}, None),
        (
            '[TOOL_CALLS][{"name": "get_time", "arguments": {"zone": "é"}}]',
            {"calls": "mistral"},
            ("", "", [TIME]),
        ),
        (
            '[{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2]}"}]',
            {"calls": "mistral"},
            ("", "", [ADD]),
        ),
        (
            '[TOOL_CALLS]get_time[ARGS]{"zone": "é"}[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2]}',
            {"calls": "mistral"},
            ("", "", [TIME, ADD]),
        ),
        ('get_time{"zone": "é"}', {"calls": "mistral"}, ("", "", [TIME])),
        ("get_timely advice", {"calls": "mistral"}, None),
        ("[1, 2]", {"calls": "mistral"}, None),
    ],
)
def test_parts(
    text: str, options: dict[str, Any], expected: tuple[Any, ...] | None, portion: int
) -> None:
    """Where nothing is expected, the text stays as it is."""
    assert split(text, portion, **options) == (expected or ("", text, []))


def test_ordinary_text_is_not_held_back() -> None:
    splitter = MessageSplitter(can_think=True, is_thinking=False, calls="hermes")
    assert splitter.feed("Good ").content == "Good "
    assert splitter.feed("day <").content == "day "
    assert splitter.feed("3\n").content == "<3"
    assert splitter.feed("", is_last=True).content == "\n"


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("{% if tools %}<|python_tag|>", "llama3"),
        ('{% if tools %}{{ \'Respond with {"name": , "parameters": }\' }}', "llama3"),
        ("{{ messages }}", None),
    ],
)
def test_formats_of_templates(template: str, kind: str | None) -> None:
    assert format_of(template) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("hermes_tools", "hermes"),
        ("qwen3", "hermes"),
        ("mistral_tools", "mistral"),
        ("llama31_tools", "llama3"),
        ("gemma", None),
        ("chatml", None),
    ],
)
def test_formats_of_known_templates(name: str, kind: str | None) -> None:
    folder = Path(__file__).parents[2] / "data" / "templates"
    assert format_of((folder / f"{name}.jinja").read_text(encoding="utf-8")) == kind


def test_ids_are_what_templates_want() -> None:
    splitter = MessageSplitter(
        can_think=False, is_thinking=False, calls="mistral", tool_names=NAMES
    )
    parts = splitter.feed('[{"name": "add", "arguments": {}}]', is_last=True)
    (call,) = whole_calls(parts.calls)
    assert len(call["id"]) == 9
    splitter = MessageSplitter(can_think=False, is_thinking=False, calls="hermes")
    (call,) = whole_calls(splitter.feed(HERMES, is_last=True).calls)
    assert call["id"].startswith("call_")


def stream(text: str, kind: Any, portion: int = 4, **options: Any) -> list[dict[str, Any]]:
    """The pieces of the calls, as a stream shows them."""
    splitter = MessageSplitter(
        can_think=False, is_thinking=False, calls=kind, tool_names=NAMES, **options
    )
    deltas: list[dict[str, Any]] = []
    for start in range(0, len(text), portion):
        parts = splitter.feed(text[start : start + portion], is_last=start + portion >= len(text))
        assert not parts.content.strip()
        deltas += [delta.to_json() for delta in parts.calls]
    return deltas


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "}<\\"", "b": [2]}}</tool_call>'),
        ("llama3", '{"name": "add", "parameters": {"a": "}<\\"", "b": [2]}}'),
        (
            "llama3",
            '<|python_tag|>{"type": "function", "name": "add", "parameters": '
            '{"a": "}<\\"", "b": [2]}}',
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "}<\\"", "b": [2]}}]'),
        ("mistral", 'add[CALL_ID]x1[ARGS]{"a": "}<\\"", "b": [2]}'),
    ],
)
def test_calls_are_streamed_while_they_are_written(kind: str, text: str) -> None:
    first, *rest = stream(text, kind)
    assert first["function"] == {"name": "add", "arguments": ""}
    assert (first["index"], first["type"]) == (0, "function")
    assert len(rest) > 4
    assert all(delta.keys() == {"index", "function"} for delta in rest)
    arguments = "".join(delta["function"]["arguments"] for delta in rest)
    assert json.loads(arguments) == {"a": '}<"', "b": [2]}


def test_second_call_has_the_second_index() -> None:
    deltas = stream(HERMES + "\n" + HERMES, "hermes")
    names = [(delta["index"], delta["function"]["name"]) for delta in deltas if "id" in delta]
    assert names == [(0, "get_time"), (1, "get_time")]


def test_no_more_calls_than_asked_for() -> None:
    both = '{"name": "add", "parameters": {}}; {"name": "get_time", "parameters": {}}'
    deltas = stream(both, "llama3", max_calls=1)
    assert [delta["function"].get("name") for delta in deltas if "id" in delta] == ["add"]
    assert {delta["index"] for delta in stream(HERMES + HERMES, "hermes", max_calls=1)} == {0}


@pytest.mark.parametrize("portion", [1, 5, 1000])
def test_calls_that_are_cut_short_stay_calls(portion: int) -> None:
    """As far as they go: the client sees by the finish reason that something is missing."""
    (first, *rest) = stream(
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b', "hermes", portion
    )
    assert first["function"]["name"] == "add"
    assert "".join(one["function"]["arguments"] for one in rest) == '{"a": 1, "b'
    deltas = stream(
        '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "hermes", portion
    )
    assert "".join(one["function"]["arguments"] for one in deltas) == '{"a": 1'


@pytest.mark.parametrize("portion", [1, 6, 1000])
def test_unusual_calls_are_read_when_they_are_whole(portion: int) -> None:
    late = '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'
    assert split(late, portion, calls="hermes")[2] == [("add", {"a": 1})]
    said = 'Let me see.[TOOL_CALLS]add[ARGS]{"a": 1}'
    assert split(said, portion, calls="mistral") == ("", "Let me see.", [("add", {"a": 1})])
    names = ("get", "get_time")
    long = split('get_time{"zone": "é"}', portion, calls="mistral", tool_names=names)
    assert long[2] == [TIME]
    odd = "<|python_tag|>print(1)"
    assert split(odd, portion, calls="llama3") == ("", odd, [])
    strange = '[TOOL_CALLS][{"name": "other", "arguments": {}}]'
    assert split(strange, portion, calls="mistral") == ("", strange, [])
