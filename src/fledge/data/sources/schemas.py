"""Which schema rows have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fledge.contracts.data_settings import SourceFormat
from fledge.data.sources.problems import RowProblem
from fledge.data.sources.schema_parsers import (
    ALPACA_FIELDS,
    COMPLETION_FIELDS,
    LIST_FIELDS,
    PARSERS,
    Draft,
    are_texts,
    parse_prompt,
)

PROMPT_FIELDS = ("turns", "prompt", "question", "instruction", "text")
ID_FIELDS = ("id", "uuid", "conversation_id", "custom_id", "task_id", "question_id")
WANTED_FIELDS = frozenset(
    {"messages", "tools", "functions", "system", "function", "instances"}
    | {*PROMPT_FIELDS, *ID_FIELDS, *LIST_FIELDS, *ALPACA_FIELDS, *COMPLETION_FIELDS}
)
"""All fields that any schema looks at."""

SCHEMAS: Mapping[SourceFormat, str] = {
    "chat": "OpenAI messages from field `messages` (and `tools`)",
    "sharegpt": "ShareGPT turns from field `conversations` (and `tools`, `system`)",
    "alpaca": "Alpaca rows from fields `instruction`, `input`, `output` (and `system`, `history`)",
    "prompts": f"prompts from one of the fields {', '.join(PROMPT_FIELDS)}, or rows of plain text",
    "tasks": "tasks from fields `instruction` and `instances`, one conversation for each instance",
    "bfcl": "function-calling questions from fields `question` and `function`",
    "completions": "functions to complete from fields `text`, `code` and `test_list`",
}


@dataclass(frozen=True, slots=True)
class Schema:
    """A way to read rows."""

    name: SourceFormat
    sentence: str
    parse: Callable[[Any], list[Draft]]


def schema_of(row: Any, wanted: SourceFormat) -> Schema | None:
    """The schema that a row has; None if it is none of the known, or not the wanted one."""
    name: SourceFormat | None = wanted
    if wanted == "auto":
        name = _name_of(row) if isinstance(row, dict) else _name_of_bare(row)
    if name is None:
        return None
    if name == "prompts":
        return _prompts_schema(row)
    parse = PARSERS[name]
    if wanted != "auto" and not _fits(parse, row):
        return None
    return Schema(name, _sentence(name, row), parse)


def _sentence(name: SourceFormat, row: Any) -> str:
    if name == "chat" and not (isinstance(row, dict) and "messages" in row):
        where = "field `prompt`" if isinstance(row, dict) else "rows that are lists"
        return f"OpenAI messages from {where}"
    return SCHEMAS[name]


def _fits(parse: Callable[[Any], list[Draft]], row: Any) -> bool:
    try:
        parse(row)
    except RowProblem as problem:
        return problem.kind != "schema"
    return True


def _name_of(row: dict[str, Any]) -> SourceFormat | None:
    if _is_bfcl(row.get("question")):
        return "bfcl"
    if "messages" in row or _is_message_list(row.get("prompt")):
        return "chat"
    if any(field in row for field in LIST_FIELDS):
        return "sharegpt"
    if "instruction" in row and isinstance(row.get("instances"), list):
        return "tasks"
    if "instruction" in row and any(field in row for field in ALPACA_FIELDS):
        return "alpaca"
    return "prompts" if _prompt_field(row) else None


def _name_of_bare(row: Any) -> SourceFormat | None:
    if isinstance(row, str) or are_texts(row):
        return "prompts"
    return "chat" if _is_message_list(row) else None


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _is_bfcl(question: Any) -> bool:
    return isinstance(question, list) and bool(question) and _is_message_list(question[0])


def _prompt_field(row: dict[str, Any]) -> str | None:
    for field in PROMPT_FIELDS:
        value = row.get(field)
        if isinstance(value, str) or are_texts(value):
            return field
    return None


def _prompts_schema(row: Any) -> Schema | None:
    if isinstance(row, dict):
        field = _prompt_field(row)
        if field is None:
            return None
        return Schema("prompts", f"prompts from field `{field}`", partial(parse_prompt, field))
    if isinstance(row, str):
        return Schema("prompts", "each row is a prompt", partial(parse_prompt, None))
    return Schema("prompts", "rows are lists of user turns", partial(parse_prompt, None))
