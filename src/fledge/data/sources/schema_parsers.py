"""How a row of each schema becomes conversations."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fledge.contracts.conversation import Message
from fledge.contracts.data_settings import SourceFormat
from fledge.data.code_request import code_request
from fledge.data.sources.function_stubs import make_stub
from fledge.data.sources.line_rows import parse_json
from fledge.data.sources.messages import read_messages
from fledge.data.sources.problems import RowProblem
from fledge.data.sources.tool_calls import read_tools

LIST_FIELDS = ("conversations", "conversation")
_INPUT_FIELDS = ("input", "context")
_OUTPUT_FIELDS = ("output", "response")
ALPACA_FIELDS = (*_INPUT_FIELDS, *_OUTPUT_FIELDS, "history")
COMPLETION_FIELDS = ("text", "code", "test_list")

# JSON Schema has other words for the types that these files name.
_BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


class Draft(NamedTuple):
    """A conversation before it has a name and an origin."""

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()


def are_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, str) for v in values)


def parse_prompt(field: str | None, row: Any) -> list[Draft]:
    value = row
    if field is not None:
        value = row.get(field) if isinstance(row, dict) else None
    turns = [value] if isinstance(value, str) else value
    if not are_texts(turns):
        where = "the row" if field is None else f"field `{field}`"
        raise RowProblem("schema", f"{where} has no text in it")
    return [Draft([{"role": "user", "content": turn} for turn in turns])]


def _parse_chat(row: Any) -> list[Draft]:
    if isinstance(row, list):
        return [Draft(read_messages(row))]
    table = _table(row)
    listed = table.get("messages")
    if listed is None:
        listed = table.get("prompt")
    tools = table.get("tools")
    return [
        Draft(
            read_messages(_listed(listed, "messages")),
            read_tools(table.get("functions") if tools is None else tools),
        )
    ]


def _parse_sharegpt(row: Any) -> list[Draft]:
    table = _table(row)
    field = next((field for field in LIST_FIELDS if field in table), LIST_FIELDS[0])
    messages = read_messages(_listed(table.get(field), field))
    system = table.get("system")
    if isinstance(system, str) and system:
        messages.insert(0, {"role": "system", "content": system})
    return [Draft(messages, read_tools(table.get("tools")))]


def _parse_alpaca(row: Any) -> list[Draft]:
    table = _table(row)
    messages: list[Message] = []
    system = _optional_text(table, "system")
    if system:
        messages.append({"role": "system", "content": system})
    for exchange in table.get("history") or ():
        if not are_texts(exchange) or len(exchange) != 2:
            raise RowProblem("schema", "field `history` is not a list of pairs of texts")
        messages += _exchange(exchange[0], exchange[1])
    given = next((text for name in _INPUT_FIELDS if (text := _optional_text(table, name))), "")
    answer = next((text for name in _OUTPUT_FIELDS if (text := _optional_text(table, name))), "")
    return [Draft(messages + _exchange(_instruction(table, given), answer))]


def _parse_tasks(row: Any) -> list[Draft]:
    table = _table(row)
    instances = table.get("instances")
    if not isinstance(instances, list) or not all(isinstance(one, dict) for one in instances):
        raise RowProblem("schema", "field `instances` is not a list of objects")
    return [
        Draft(
            _exchange(
                _instruction(table, _optional_text(instance, "input")),
                _optional_text(instance, "output"),
            )
        )
        for instance in instances or [{}]
    ]


def _parse_bfcl(row: Any) -> list[Draft]:
    table = _table(row)
    turns = table.get("question")
    if not isinstance(turns, list) or not all(isinstance(turn, list) for turn in turns):
        raise RowProblem("schema", "field `question` is not a list of turns")
    messages = read_messages([message for turn in turns for message in turn])
    return [Draft(messages, tuple(map(_json_schema, read_tools(table.get("function")))))]


def _parse_completion(row: Any) -> list[Draft]:
    table = _table(row)
    text, code, tests = (table.get(field) for field in COMPLETION_FIELDS)
    if not isinstance(text, str) or not isinstance(code, str) or not are_texts(tests):
        raise RowProblem("schema", "it has no texts in fields `text`, `code` and `test_list`")
    return [Draft(_exchange(code_request(make_stub(text, code, list(tests or ()))), ""))]


PARSERS: Mapping[SourceFormat, Callable[[Any], list[Draft]]] = {
    "chat": _parse_chat,
    "sharegpt": _parse_sharegpt,
    "alpaca": _parse_alpaca,
    "tasks": _parse_tasks,
    "bfcl": _parse_bfcl,
    "completions": _parse_completion,
}


def _table(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise RowProblem("schema", f"the row is a {type(row).__name__}, not an object with fields")
    return row


def _listed(value: Any, field: str) -> Any:
    """A list; some tables hold it as JSON text."""
    if isinstance(value, str):
        value = parse_json(value)
    if value is None:
        raise RowProblem("schema", f"it has no field `{field}`")
    return value


def _optional_text(table: dict[str, Any], field: str) -> str:
    value = table.get(field)
    if value is not None and not isinstance(value, str):
        raise RowProblem("schema", f"field `{field}` is {type(value).__name__}, not text")
    return value or ""


def _instruction(table: dict[str, Any], given: str) -> str:
    instruction = table.get("instruction")
    if not isinstance(instruction, str):
        raise RowProblem("schema", "it has no text in field `instruction`")
    return (
        f"{instruction}\n\n{given}"
        if given.strip() and instruction.strip()
        else (instruction or given)
    )


def _exchange(prompt: str, answer: str) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": prompt}]
    if answer:
        messages.append({"role": "assistant", "content": answer})
    return messages


def _json_schema(value: Any) -> Any:
    """The same definition with the type names of JSON Schema; `any` is no type at all."""
    if isinstance(value, list):
        return [_json_schema(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _BFCL_TYPES.get(one, one)
        if key == "type" and isinstance(one, str)
        else (_json_schema(one))
        for key, one in value.items()
        if not (key == "type" and one == "any")
    }
