"""Tool calls and their results in OpenAI's form, whatever form they came in.

A call without an id gets one made of its number in the conversation. It has nine letters and
digits, since some chat templates accept nothing else.
"""

import json
from typing import Any

from fledge.contracts.conversation import Message
from fledge.data.sources.line_rows import parse_json
from fledge.data.sources.problems import RowProblem

_MAX_SHOWN_CHARS = 60


class CallLog:
    """The calls of one conversation, so that results can be given to those they answer."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: dict[str, str] = {}
        """Names of calls without a result, by id, in order."""

        self._answered: dict[str, str] = {}

    def add(self, raw: Any) -> dict[str, Any]:
        """A call in OpenAI's form, of one in that form or of bare name and arguments."""
        function = raw.get("function", raw) if isinstance(raw, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise RowProblem("tool call", f"a tool call has no name: {_shown(raw)}")
        self._num_calls += 1
        call_id = raw.get("id")
        if not isinstance(call_id, str) or not call_id:
            call_id = f"call{self._num_calls:05d}"
        self._open[call_id] = name
        arguments = _arguments(function.get("arguments", function.get("parameters")), name)
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def answer(self, call_id: Any, name: Any) -> tuple[str, str]:
        """Id and name of the call that a result belongs to."""
        if isinstance(call_id, str) and call_id:
            found = call_id if call_id in self._open or call_id in self._answered else None
        else:
            same_name = [one for one, called in self._open.items() if called == name]
            found = next(iter(same_name or self._open), None)
        if found is None:
            raise RowProblem(
                "tool result without a call",
                f"a tool result for {call_id!r} has no such call before it"
                if call_id
                else "a tool result has no unanswered call before it",
            )
        if found in self._open:
            self._answered[found] = self._open.pop(found)
        return found, self._answered[found]


def calls_in_text(text: Any) -> list[Any]:
    """The calls of a ShareGPT `function_call` turn: JSON text of one or of several."""
    value = _parsed(text, "function_call") if isinstance(text, str) else text
    return value if isinstance(value, list) else [value]


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Tool definitions in OpenAI's form, of a list, of one, or of JSON text of either."""
    if isinstance(value, str):
        value = _parsed(value, "tools") if value.strip() else None
    if value is None:
        return ()
    return tuple(_read_tool(one) for one in (value if isinstance(value, list) else [value]))


def _read_tool(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = _parsed(value, "tools")
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowProblem("tool definition", f"a tool definition has no name: {_shown(value)}")
    return {"type": "function", "function": function}


def _arguments(value: Any, name: str) -> str:
    """As JSON text of an object; a text that is one already stays as it is."""
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        if not isinstance(_parsed(value, f"the arguments of {name}"), dict):
            raise RowProblem("tool call", f"the arguments of {name} are no object: {_shown(value)}")
        return value
    if not isinstance(value, dict):
        raise RowProblem("tool call", f"the arguments of {name} are no object: {_shown(value)}")
    return dump_json(value, f"the arguments of {name}")


def dump_json(value: Any, what: str) -> str:
    """JSON text that any program can read back; numbers too large to be numbers are refused."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise RowProblem("not JSON", f"{what} cannot be written as JSON: {error}") from error
    except RecursionError as error:
        raise RowProblem("nested too deeply", f"{what} are nested too deeply") from error


def _parsed(text: str, what: str) -> Any:
    try:
        return parse_json(text)
    except RowProblem as problem:
        raise RowProblem("tool call", f"{what}: {problem.detail}") from problem


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def tool_message(content: str, call_id: str, name: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call_id, "name": name}
