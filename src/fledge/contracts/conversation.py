"""A row of data: one conversation, where it came from, and who answered it.

Messages are OpenAI's: `role` is system, developer, user, assistant or tool; `content` is a text (or
None beside tool calls); an assistant may carry `reasoning_content` and `tool_calls`, whose
`arguments` are JSON text, a tool result its `tool_call_id` and `name`. They stay plain
dictionaries, since chat templates read them so. User messages in a row are turns not yet answered.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fledge.contracts.errors import ArtifactError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")

AnswerFinish = Literal["stop", "length", "tool_calls", "content_filter"]


_COPY = re.compile(r"~([1-9][0-9]*)$")
_VARIANT = re.compile(r"(?<=[0-9])\+[1-9][0-9]*$")


def copy_id(row_id: str, copy: int) -> str:
    """The id of a row that is asked again, for the second time with a `copy` of 1."""
    return f"{row_id}~{copy + 1}" if copy else row_id


def split_copy_id(row_id: str) -> tuple[str, int]:
    """The id of the row that is asked, and how many times it was asked before."""
    found = _COPY.search(row_id)
    return (row_id[: found.start()], int(found[1]) - 1) if found else (row_id, 0)


def variant_id(row_id: str, number: int) -> str:
    """The id of a variant of a row, counted from 1."""
    return f"{row_id}+{number}"


def asked_id(row_id: str) -> str:
    """The id that all answers to a row and to its variants have in common."""
    return _VARIANT.sub("", split_copy_id(row_id)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a row came from, so that every row of a head's data can be found again."""

    source: str
    """The source's name in the recipe."""

    licence: str
    """As the recipe declares it."""

    file: str
    """Name of the file, object or data set; `self` for prompts the target wrote."""

    row: int
    """Line or row number in that file, from 1."""

    row_id: str | None = None
    """The id the row brought along, if it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How one assistant message was made by the target."""

    message: int
    """Its index in the conversation's messages."""

    model: str
    temperature: float
    seed: int
    finish_reason: AnswerFinish
    token_ids: tuple[int, ...] | None = None
    """The ids as they were sampled, the ending token included; None when only text came back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One row of data."""

    id: str
    """Unique in its directory: the source's name and the row's number there, and `+2` behind them
    for the second variant of a row."""

    messages: tuple[Message, ...]
    origin: Origin
    tools: tuple[dict[str, Any], ...] = ()
    """Tool definitions in OpenAI's form, `{"type": "function", "function": {...}}`."""

    answers: tuple[Answer, ...] = field(default=())
    """One for each assistant message that the target wrote."""

    def to_json(self) -> dict[str, Any]:
        """A dictionary for one JSON line; empty fields are left out."""
        row: dict[str, Any] = {"id": self.id, "messages": list(self.messages)}
        if self.tools:
            row["tools"] = list(self.tools)
        row["origin"] = _filled(self.origin)
        if self.answers:
            row["answers"] = [_filled(answer) for answer in self.answers]
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Conversation":
        """The reverse of `to_json`, for rows that fledge itself wrote."""
        try:
            if not (isinstance(row["id"], str) and isinstance(row["messages"], list)):
                raise TypeError("its id is no text, or its messages are no list")
            answers = tuple(
                Answer(**{**answer, "token_ids": _ids(answer.get("token_ids"))})
                for answer in row.get("answers", ())
            )
            return cls(
                id=row["id"],
                messages=tuple(row["messages"]),
                origin=Origin(**row["origin"]),
                tools=tuple(row.get("tools", ())),
                answers=answers,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                f"this is not a row that fledge wrote ({error!r}): {str(row)[:200]}"
            ) from error


def _filled(record: Origin | Answer) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in record.__slots__}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None
    }


def _ids(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)
