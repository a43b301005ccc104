"""Messages in OpenAI's form, of chat messages and of ShareGPT turns.

Texts stay as they are: thinking blocks, any language, spaces. Keys that the contract does not know
are left out.
"""

from typing import Any

from fledge.contracts.conversation import ROLES, Message
from fledge.data.sources.problems import RowProblem
from fledge.data.sources.tool_calls import CallLog, calls_in_text, dump_json, tool_message

_CALL = "function_call"
_SPEAKERS = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    _CALL: _CALL,
}


def read_messages(turns: Any) -> list[Message]:
    """The messages of one conversation."""
    if not isinstance(turns, list) or not turns:
        raise RowProblem("no messages", "its list of messages is empty or no list")
    calls = CallLog()
    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise RowProblem("no messages", f"message {number} is no object")
        try:
            _append(messages, turn, calls)
        except RowProblem as problem:
            raise RowProblem(problem.kind, f"message {number}: {problem.detail}") from problem
    return messages


def _append(messages: list[Message], turn: dict[str, Any], calls: CallLog) -> None:
    role = _role(turn)
    value = turn["content"] if "content" in turn else turn.get("value")
    if role == _CALL:
        tool_calls = [calls.add(call) for call in calls_in_text(value)]
        if messages and messages[-1]["role"] == "assistant":
            # The turn goes on: what was said before the call, or another call beside it.
            messages[-1].setdefault("tool_calls", []).extend(tool_calls)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": tool_calls})
    elif role == "tool":
        call_id, name = calls.answer(turn.get("tool_call_id"), turn.get("name"))
        messages.append(tool_message(_tool_text(value), call_id, name))
    elif role == "assistant":
        messages.append(_assistant(turn, value, calls))
    else:
        message: Message = {"role": role, "content": _text(value) or ""}
        if isinstance(turn.get("name"), str) and turn["name"]:
            message["name"] = turn["name"]
        messages.append(message)


def _role(turn: dict[str, Any]) -> str:
    said = turn["role"] if "role" in turn else turn.get("from")
    role = _SPEAKERS.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise RowProblem(
            "unknown role", f"the role {said!r} is not known; known are {', '.join(_SPEAKERS)}"
        )
    return role


def _assistant(turn: dict[str, Any], value: Any, calls: CallLog) -> Message:
    message: Message = {"role": "assistant", "content": _text(value)}
    reasoning = turn.get("reasoning_content") or turn.get("reasoning")
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    raw_calls = turn.get("tool_calls")
    if not raw_calls and isinstance(turn.get(_CALL), dict):
        raw_calls = [turn[_CALL]]
    if raw_calls:
        if not isinstance(raw_calls, list):
            raise RowProblem("tool call", "its tool_calls are no list")
        message["tool_calls"] = [calls.add(call) for call in raw_calls]
    return message


def _text(value: Any) -> str | None:
    """A text, of a text or of a list of text parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RowProblem("content", f"its content is {type(value).__name__}, not text")
    return "".join(_part(part) for part in value)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise RowProblem("content", f"its content has a part of type {kind!r}; only text is read")
    return text


def _tool_text(value: Any) -> str:
    """Results that are no text are written as JSON."""
    is_parts = isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in value
    )
    if isinstance(value, str) or (is_parts and value):
        return _text(value) or ""
    return "" if value is None else dump_json(value, "a tool result")
