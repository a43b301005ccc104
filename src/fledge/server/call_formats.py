"""Tool calls in the text of an answer, in the formats that common targets were taught.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>          Qwen, Hermes
    llama3    {"name": ..., "parameters": {...}}, several joined by ;           Llama 3
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}], or, newer,
              [TOOL_CALLS]name[ARGS]{...}; the marks may be missing             Mistral

A hermes call may stand anywhere; the others are the whole answer or nothing.
"""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

CallFormat = Literal["hermes", "llama3", "mistral"]

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_PYTHON = "<|python_tag|>"
_SEPARATORS = re.compile(r"[\s;,]*")


class Call(NamedTuple):
    """A tool that the target wants to use."""

    id: str
    name: str
    arguments: str
    """JSON."""

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template teaches; None when it knows no tools."""
    if OPEN_CALL in template:
        return "hermes"
    if _MISTRAL in template:
        return "mistral"
    if _PYTHON in template or ('"parameters"' in template and "tools" in template):
        return "llama3"
    return None


def parse_hermes(text: str) -> list[Call] | None:
    """The call between two tags."""
    try:
        return [_call(json.loads(text), "call_")]
    except (ValueError, TypeError, KeyError):
        return None


def may_be_calls(text: str, kind: CallFormat, names: Sequence[str]) -> bool:
    """Whether an answer that begins like this may turn out to be calls."""
    begun = text.lstrip()
    if kind == "llama3":
        return not begun or begun.startswith("{") or _agree(begun, _PYTHON)
    starts = [_MISTRAL, "[{", *(name + "{" for name in names), *(name + _ARGS for name in names)]
    return any(_agree(begun, start) for start in starts)


def parse_whole(text: str, kind: CallFormat, names: Sequence[str]) -> list[Call] | None:
    """The calls that an answer consists of; None when it is something else."""
    try:
        if kind == "llama3":
            calls = _parse_objects(text.strip().removeprefix(_PYTHON))
        else:
            calls = _parse_mistral(text.strip().removeprefix(_MISTRAL).strip(), names)
    except (ValueError, TypeError, KeyError):
        return None
    is_known = bool(calls) and all(call.name in names for call in calls)
    return calls if is_known else None


def _parse_objects(text: str) -> list[Call]:
    decoder = json.JSONDecoder()
    calls, place = [], _skip(text, 0)
    while place < len(text):
        document, place = decoder.raw_decode(text, place)
        calls.append(_call(document, "call_"))
        place = _skip(text, place)
    return calls


def _parse_mistral(text: str, names: Sequence[str]) -> list[Call]:
    if text.startswith("["):
        return [_call(document, "") for document in json.loads(text)]
    decoder = json.JSONDecoder()
    calls, place = [], 0
    while place < len(text):
        name = next(name for name in (*names, "") if text.startswith(name, place))
        place += len(name)
        if text.startswith(_ARGS, place):
            place += len(_ARGS)
        arguments, place = decoder.raw_decode(text, place)
        calls.append(_call({"name": name, "arguments": arguments}, ""))
        place = _skip(text, place)
        if text.startswith(_MISTRAL, place):
            place += len(_MISTRAL)
    return calls


def _call(document: Any, prefix: str) -> Call:
    """Mistral's templates want ids of nine letters, so theirs have no prefix."""
    name = document["name"]
    arguments = document["arguments"] if "arguments" in document else document["parameters"]
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        raise TypeError("a call needs a name and arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    letters = secrets.token_hex(12)
    return Call(prefix + letters if prefix else letters[:9], name, arguments)


def _skip(text: str, place: int) -> int:
    match = _SEPARATORS.match(text, place)
    return match.end() if match else place


def _agree(text: str, start: str) -> bool:
    """Whether one of them is the beginning of the other."""
    return text.startswith(start) or start.startswith(text)
