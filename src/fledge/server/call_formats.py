"""How common targets write tool calls, and whole calls read back.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>          Qwen, Hermes
    llama3    {"name": ..., "parameters": {...}}, several joined by ;           Llama 3
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}], or, newer,
              [TOOL_CALLS]name[ARGS]{...}; the marks may be missing             Mistral

Behind a mark there are calls; without one a llama3 or mistral answer is calls altogether or not at
all. The marks are special tokens of some tokenizers and plain text of others.
"""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

CallFormat = Literal["hermes", "llama3", "mistral"]

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
MISTRAL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
PYTHON_TAG = "<|python_tag|>"
OPENINGS: dict[CallFormat, str] = {
    "hermes": OPEN_CALL,
    "llama3": PYTHON_TAG,
    "mistral": MISTRAL_CALLS,
}
MARKS: dict[CallFormat, tuple[str, ...]] = {
    "hermes": (OPEN_CALL, CLOSE_CALL),
    "llama3": (PYTHON_TAG,),
    "mistral": (MISTRAL_CALLS, ARGS, CALL_ID),
}
"""What must be seen of an answer although it may consist of special tokens."""

_SEPARATORS = re.compile(r"[\s;,]*")
_MISTRAL_MARKS = re.compile(r"(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?")


class Call(NamedTuple):
    """A tool that the target wants to use."""

    name: str
    arguments: str
    """JSON."""


def new_call_id(kind: CallFormat) -> str:
    """Mistral's templates want ids of nine letters."""
    letters = secrets.token_hex(12)
    return letters[:9] if kind == "mistral" else f"call_{letters}"


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template teaches; None when it knows no tools."""
    if OPEN_CALL in template:
        return "hermes"
    if MISTRAL_CALLS in template:
        return "mistral"
    if PYTHON_TAG in template or ('"parameters"' in template and "tools" in template):
        return "llama3"
    return None


def may_be_calls(text: str, kind: CallFormat, names: Sequence[str]) -> bool:
    """Whether an answer that begins like this may turn out to be calls without a mark."""
    begun = text.lstrip()
    if kind == "llama3":
        return not begun or begun.startswith("{")
    starts = ["[{", *(name + behind for name in names for behind in ("{", ARGS, CALL_ID))]
    return any(_agree(begun, start) for start in starts)


def parse_one(text: str) -> list[Call] | None:
    """The call that a text is, whatever tool it names."""
    try:
        return [_call(json.loads(text))]
    except (ValueError, TypeError, KeyError):
        return None


def parse_whole(text: str, kind: CallFormat, names: Sequence[str]) -> list[Call] | None:
    """The calls that a text consists of; None when it is something else."""
    try:
        if kind == "llama3":
            calls = _parse_objects(text.strip())
        else:
            calls = _parse_mistral(text.strip(), names)
    except (ValueError, TypeError, KeyError):
        return None
    is_known = bool(calls) and all(call.name in names for call in calls)
    return calls if is_known else None


def _parse_objects(text: str) -> list[Call]:
    decoder = json.JSONDecoder()
    calls, place = [], _skip(text, 0)
    while place < len(text):
        document, place = decoder.raw_decode(text, place)
        calls.append(_call(document))
        place = _skip(text, place)
    return calls


def _parse_mistral(text: str, names: Sequence[str]) -> list[Call]:
    if text.startswith("["):
        return [_call(document) for document in json.loads(text)]
    decoder = json.JSONDecoder()
    calls, place = [], 0
    while place < len(text):
        name = next(name for name in (*_longest_first(names), "") if text.startswith(name, place))
        place += len(name)
        marks = _MISTRAL_MARKS.match(text, place)
        place = marks.end() if marks else place
        arguments, place = decoder.raw_decode(text, place)
        calls.append(_call({"name": name, "arguments": arguments}))
        place = _skip(text, place)
        if text.startswith(MISTRAL_CALLS, place):
            place += len(MISTRAL_CALLS)
    return calls


def _longest_first(names: Sequence[str]) -> list[str]:
    """One name may be the beginning of another."""
    return sorted(names, key=len, reverse=True)


def _call(document: Any) -> Call:
    name = document["name"]
    arguments = document["arguments"] if "arguments" in document else document["parameters"]
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        raise TypeError("a call needs a name and arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(name, arguments)


def _skip(text: str, place: int) -> int:
    match = _SEPARATORS.match(text, place)
    return match.end() if match else place


def _agree(text: str, start: str) -> bool:
    """Whether one of them is the beginning of the other."""
    return text.startswith(start) or start.startswith(text)
