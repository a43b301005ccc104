"""Where a conversation has texts, and how to put others in their place.

Texts are contents, reasoning, arguments of tool calls, results of tools, and the prose and examples
in definitions of tools. Roles, names of functions, ids and keys are not texts. JSON is changed only
inside its strings and stays as it was everywhere else, so valid JSON stays valid.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from fledge.contracts.conversation import Answer, Conversation, Message

# A text, and the name of the field it stands in, which may say what it is: "phone", "ssn".
Rewrite = Callable[[str, str], str]

_TEXT_KEYS = ("content", "reasoning_content")
_SCHEMA_KEYS = frozenset(
    ("name", "type", "$ref", "$id", "$schema", "format", "pattern", "required")
)
_EXAMPLE_KEYS = frozenset(("example", "examples", "default", "enum", "const"))
_STRING_OR_KEY = re.compile(r'"(?:[^"\\]|\\.)*+"(\s*:)?')


def rewrite_conversation(conversation: Conversation, rewrite: Rewrite) -> Conversation:
    """The conversation with every text rewritten; the same object when nothing changed."""
    messages = tuple(_message(message, rewrite) for message in conversation.messages)
    tools = tuple(_definition(tool, "", rewrite) for tool in conversation.tools)
    if messages == conversation.messages and tools == conversation.tools:
        return conversation
    is_changed = [new != old for new, old in zip(messages, conversation.messages, strict=True)]
    answers = tuple(
        _without_ids(answer) if is_changed[answer.message] else answer
        for answer in conversation.answers
    )
    return dataclasses.replace(conversation, messages=messages, tools=tools, answers=answers)


def _without_ids(answer: Answer) -> Answer:
    """Ids that were sampled spell the old text, not the changed one."""
    return dataclasses.replace(answer, token_ids=None)


def _message(message: Message, rewrite: Rewrite) -> Message:
    result = dict(message)
    for key in _TEXT_KEYS:
        if message.get(key):
            # A program wrote a tool's result, and the target's next turn may quote it as JSON.
            is_result = message.get("role") == "tool"
            result[key] = _json_or_prose(message[key], rewrite, is_json_likely=is_result)
    if message.get("tool_calls"):
        result["tool_calls"] = [_call(call, rewrite) for call in message["tool_calls"]]
    return result


def _call(call: dict[str, Any], rewrite: Rewrite) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    arguments = _json_or_prose(function["arguments"], rewrite, is_json_likely=True)
    return {**call, "function": {**function, "arguments": arguments}}


def _json_or_prose(value: Any, rewrite: Rewrite, *, is_json_likely: bool) -> Any:
    if not isinstance(value, str):
        return _value(value, "", rewrite)
    if is_json_likely and value.lstrip().startswith(("{", "[", '"')) and _is_json(value):
        return _json_text(value, rewrite)
    return rewrite(value, "")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json_text(text: str, rewrite: Rewrite) -> str:
    """Valid JSON with its strings rewritten in place."""
    field = ""

    def rewrite_string(match: re.Match[str]) -> str:
        nonlocal field
        if match[1]:
            field = match[0]
            return match[0]
        old = json.loads(match[0])
        new = rewrite(old, field.rstrip(": \t\r\n").strip('"'))
        if new == old:
            return match[0]
        # A lone half of a surrogate pair can only be written as an escape.
        return json.dumps(new, ensure_ascii=match[0].isascii() or "\\ud" in match[0].lower())

    return _STRING_OR_KEY.sub(rewrite_string, text)


def _value(value: Any, field: str, rewrite: Rewrite) -> Any:
    if isinstance(value, str):
        return rewrite(value, field)
    if isinstance(value, list):
        return [_value(item, field, rewrite) for item in value]
    if isinstance(value, dict):
        return {key: _value(item, str(key), rewrite) for key, item in value.items()}
    return value


def _definition(value: Any, parameter: str, rewrite: Rewrite) -> Any:
    """A part of a tool's definition, where every key is a word of JSON schema."""
    if isinstance(value, str):
        return rewrite(value, "")
    if isinstance(value, list):
        return [_definition(item, parameter, rewrite) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        if key in _SCHEMA_KEYS:
            result[key] = item
        elif key in _EXAMPLE_KEYS:
            result[key] = _value(item, parameter, rewrite)
        elif key in ("properties", "$defs", "definitions") and isinstance(item, dict):
            result[key] = {name: _definition(one, name, rewrite) for name, one in item.items()}
        else:
            result[key] = _definition(item, parameter, rewrite)
    return result
