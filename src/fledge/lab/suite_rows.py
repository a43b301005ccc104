"""One row of a suite's file to one prompt; the columns say which benchmark it is of."""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from fledge.data.code_request import code_request
from fledge.lab.suite_prompts import Check, NumberCheck, ProgramCheck, Prompt

ID_COLUMNS = ("id", "question_id", "task_id", "prompt_id")
TASK_COLUMNS = ("task", "category")
TEXT_COLUMNS = ("turns", "prompt", "question", "instruction", "messages")
_OTHER_COLUMNS = (
    "answer",
    "reference",
    "system",
    "test",
    "entry_point",
    "canonical_solution",
    "meta",
)
COLUMNS = frozenset((*ID_COLUMNS, *TASK_COLUMNS, *TEXT_COLUMNS, *_OTHER_COLUMNS))

MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
MT_BENCH = "mt-bench"
_GSM8K, _HUMANEVAL = "gsm8k", "humaneval"
_GSM8K_END = re.compile(r"####\s*([-+]?[\d,]*\.?\d+)\s*$")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


class RowError(Exception):
    """What is wrong with a row, for a sentence that names its file and line."""


def read_row(row: Any, *, place: str, default_task: str) -> Prompt:
    """The prompt of a row; `place` is its id where it brings none."""
    if not isinstance(row, Mapping):
        raise RowError(f"it is a {type(row).__name__}, not an object with columns")
    _check_columns(row)
    found = next((row[name] for name in ID_COLUMNS if name in row), place)
    name = str(found)
    if "entry_point" in row or "test" in row:
        return _program(row, name, _task(row, default=_HUMANEVAL))
    turns, system = _turns(row)
    task = _task(row, default=_GSM8K if _is_gsm8k(row) else default_task)
    if task in MT_BENCH_CATEGORIES and "question_id" in row or "prompt_id" in row:
        task = MT_BENCH
    return Prompt(id=name, task=task, turns=turns, system=system, check=_number(row))


def _check_columns(row: Mapping[str, Any]) -> None:
    unknown = [str(name) for name in row if name not in COLUMNS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(COLUMNS), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(COLUMNS))}."
        raise RowError(
            f"it has the unknown column {unknown[0]!r}; {hint} What is not meant for fledge may "
            "stand in `meta`"
        )
    texts = [name for name in TEXT_COLUMNS if name in row]
    if not texts:
        found = ", ".join(map(str, row)) or "none"
        raise RowError(
            f"none of its columns is a prompt (it has {found}); name one {', '.join(TEXT_COLUMNS)}"
        )
    if len(texts) > 1:
        raise RowError(f"both {texts[0]!r} and {texts[1]!r} are prompts; keep one of them")


def _turns(row: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """What the user says, and what the system said before."""
    name = next(name for name in TEXT_COLUMNS if name in row)
    value = row[name]
    system = _text(row["system"], "system") if row.get("system") is not None else None
    if name == "messages":
        return _messages(value, system)
    turns = value if isinstance(value, list) else [value]
    if not turns:
        raise RowError(f"its {name} are empty")
    return tuple(_text(turn, name) for turn in turns), system


def _messages(value: Any, system: str | None) -> tuple[tuple[str, ...], str | None]:
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise RowError("its messages are not a list of objects with role and content")
    turns: list[str] = []
    for message in value:
        role = message.get("role")
        if role == "system" and not turns:
            system = _text(message.get("content"), "system message")
        elif role == "user":
            turns.append(_text(message.get("content"), "user message"))
        elif role != "assistant":
            raise RowError(f"a message has the role {role!r}; known are system, user, assistant")
    # What somebody else answered is left out: later turns continue the target's own answers.
    if not turns:
        raise RowError("its messages have no user turn")
    return tuple(turns), system


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"its {name} is a {type(value).__name__}, not a text")
    if not value.strip():
        raise RowError(f"its {name} is empty")
    return value


def _task(row: Mapping[str, Any], *, default: str) -> str:
    found = next((row[name] for name in TASK_COLUMNS if name in row), default)
    return _text(found, "task")


def _is_gsm8k(row: Mapping[str, Any]) -> bool:
    answer = row.get("answer")
    return isinstance(answer, str) and _GSM8K_END.search(answer.strip()) is not None


def _number(row: Mapping[str, Any]) -> Check | None:
    """The number that the answer must end with; other references are for people."""
    answer = row.get("answer")
    if answer is None:
        return None
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return NumberCheck(number=plain_number(str(answer)))
    if isinstance(answer, str):
        ended = _GSM8K_END.search(answer.strip())
        if ended is not None:
            return NumberCheck(number=plain_number(ended[1]))
        if _NUMBER.fullmatch(answer.strip()):
            return NumberCheck(number=plain_number(answer.strip()))
        return None
    raise RowError(f"its answer is a {type(answer).__name__}, neither a number nor a text")


def plain_number(text: str) -> str:
    """A number as it is compared: `1,200.50` and `+1200.5` are the same."""
    plain = text.replace(",", "").removeprefix("+")
    if "." in plain:
        plain = plain.rstrip("0").removesuffix(".")
    return "0" if plain in ("-0", "") else plain


def last_number(text: str) -> str | None:
    """The last number of a text, None where there is none."""
    found = _NUMBER.findall(text)
    return plain_number(found[-1].rstrip(",")) if found else None


def _program(row: Mapping[str, Any], name: str, task: str) -> Prompt:
    stub, entry_point, test = (
        _text(row.get(column), column) for column in ("prompt", "entry_point", "test")
    )
    return Prompt(
        id=name,
        task=task,
        turns=(code_request(stub),),
        raw=stub,
        check=ProgramCheck(stub=stub, entry_point=entry_point, test=test),
    )
