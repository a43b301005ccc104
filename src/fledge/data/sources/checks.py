"""What every conversation must keep, whichever schema it came in."""

from collections.abc import Sequence
from typing import Any

from fledge.contracts.conversation import Message
from fledge.data.sources.problems import RowProblem
from fledge.data.sources.tool_calls import dump_json


def check_conversation(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], max_turn_chars: int
) -> None:
    """Raise for a row that no later stage could use.

    Who speaks when is left open: data have several system prompts, or users who speak twice.
    """
    if not any(message["role"] == "user" for message in messages):
        raise RowProblem("no user message", "it has no user message")
    for number, message in enumerate(messages, start=1):
        try:
            _check_message(message, max_turn_chars)
        except RowProblem as problem:
            raise RowProblem(problem.kind, f"message {number}: {problem.detail}") from problem
    if tools:
        _check_text(dump_json(tools, "its tools"), max_turn_chars, "the text of its tools")


def _check_message(message: Message, max_turn_chars: int) -> None:
    content: str = message["content"] or ""
    _check_text(content, max_turn_chars, "the turn")
    role = message["role"]
    if role == "user" and not content.strip():
        raise RowProblem("empty user message", "the user says nothing")
    if role != "assistant":
        return
    reasoning: str = message.get("reasoning_content", "")
    calls = message.get("tool_calls", ())
    _check_text(reasoning, max_turn_chars, "the reasoning")
    for call in calls:
        _check_text(call["function"]["arguments"], max_turn_chars, "a tool call")
    if not (content.strip() or reasoning or calls):
        raise RowProblem("empty assistant message", "the assistant says nothing")


def _check_text(text: str, max_chars: int, what: str) -> None:
    if len(text) > max_chars:
        raise RowProblem(
            "turn too long",
            f"{what} has {len(text):,} characters, and max_turn_chars is {max_chars:,}",
        )
    if "\0" in text:
        raise RowProblem("null byte", f"{what} contains a null character")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowProblem(
                "not UTF-8", f"{what} contains half of a surrogate pair, or is not UTF-8"
            ) from error
