"""One conversation on its way through the target: what to ask next, and what comes out.

A turn is what the user or a tool says, and the run of assistant messages that follows. User
messages in a row are turns of their own that nobody has answered yet.

    turns = "last"   the last turn is asked again, and those without an answer just before it
    turns = "all"    every turn is asked in order; the target's own answers are the history

The conversation ends early where going on would not make sense:

- an answer was cut (token limit, content filter);
- recorded tool results follow, and the answer does not call the same tools, each once;
- the answer calls tools, and no results were recorded.

Recorded results are given to the calls of the same name, in order, whatever the arguments.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fledge.contracts.conversation import (
    Answer,
    AnswerFinish,
    Conversation,
    Message,
    split_copy_id,
)
from fledge.contracts.regenerate_settings import RegenerateSettings

_SEED_BITS = 31
"""Every server takes seeds of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the target is asked for one turn."""

    row: int
    """The row's number in the input, from 0."""

    turn: int
    """How many turns of this row were answered before, from 0."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the target said."""

    message: Message
    finish_reason: AnswerFinish
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that yields no conversation."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Turn:
    """Messages that are given, and what the assistant once said to them."""

    given: tuple[Message, ...]
    recorded: tuple[Message, ...]
    end: int
    """Where the given messages end in the conversation."""


class Dialogue:
    """Asks about one conversation, turn by turn."""

    def __init__(
        self, row: int, conversation: Conversation, settings: RegenerateSettings, model: str
    ) -> None:
        self.row = row
        self._conversation = conversation
        self._settings = settings
        self._model = model
        self._turns = _turns_of(conversation.messages, settings)
        self._messages: list[Message] = []
        self._answers: list[Answer] = []
        self.is_cut = False
        """It ended before all recorded turns were asked."""

        row_id, copy = split_copy_id(conversation.id)
        number = stable_number(settings.seed, row_id) + copy
        temperatures = settings.temperatures_of(conversation.origin.source)
        self._temperature = temperatures[number % len(temperatures)]
        self._pending: tuple[Message, ...] | None = self._turns[0].given if self._turns else None

    @property
    def id(self) -> str:
        return self._conversation.id

    @property
    def num_turns(self) -> int:
        """How many answers are wanted, if the conversation does not end early."""
        return len(self._turns)

    @property
    def is_over(self) -> bool:
        """There is nothing to ask, or nothing more."""
        return self._pending is None

    @property
    def question(self) -> Question | None:
        """What to ask next; None when the conversation is over."""
        if self._pending is None:
            return None
        return Question(
            row=self.row,
            turn=len(self._answers),
            messages=(*self._messages, *self._pending),
            tools=self._conversation.tools,
            temperature=self._temperature,
            seed=self._seed,
        )

    @property
    def _seed(self) -> int:
        number = stable_number(self._settings.seed, self.id, len(self._answers))
        return number % (1 << _SEED_BITS)

    def take(self, reply: Reply) -> None:
        """The answer to the question."""
        assert self._pending is not None, "nothing was asked"
        self._messages += self._pending
        self._answers.append(
            Answer(
                message=len(self._messages),
                model=self._model,
                temperature=self._temperature,
                seed=self._seed,
                finish_reason=reply.finish_reason,
                token_ids=reply.token_ids,
            )
        )
        self._messages.append(reply.message)
        self._pending = self._following(reply)

    def _following(self, reply: Reply) -> tuple[Message, ...] | None:
        """The messages that are given after this answer, None when it was the last."""
        num_answered = len(self._answers)
        if num_answered == len(self._turns):
            return None
        given = None
        if reply.finish_reason not in ("length", "content_filter"):
            recorded = self._turns[num_answered - 1].recorded
            given = _rejoined(self._turns[num_answered].given, recorded, reply.message)
        self.is_cut = given is None
        return given

    def outcome(self) -> Conversation | Dropped:
        """The conversation with the target's answers, or why there is none."""
        if not self._turns:
            return Dropped("nothing to ask")
        assert self._pending is None, "the conversation is not over"
        finish_reason = self._answers[-1].finish_reason
        if finish_reason == "content_filter":
            return Dropped("content_filter")
        if finish_reason == "length" and not self._settings.keep_truncated:
            return Dropped("truncated")
        return Conversation(
            id=self.id,
            messages=tuple(self._messages),
            origin=self._conversation.origin,
            tools=self._conversation.tools,
            answers=tuple(self._answers),
        )


def stable_number(*parts: object) -> int:
    """A number that depends on these values alone: on no process, machine or order of rows."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", errors="surrogatepass"))
    return int.from_bytes(digest.digest()[:8], "big")


def _turns_of(messages: Sequence[Message], settings: RegenerateSettings) -> list[_Turn]:
    turns = _all_turns(messages)
    if settings.turns == "all" or not turns:
        return turns
    first = len(turns) - 1
    while first > 0 and not turns[first - 1].recorded:
        first -= 1
    begin = turns[first]
    return [_Turn(tuple(messages[: begin.end]), begin.recorded, begin.end), *turns[first + 1 :]]


def _all_turns(messages: Sequence[Message]) -> list[_Turn]:
    """Every turn that asks something.

    Assistant messages that answer nobody (a greeting before the first user) are left out, and so
    are tool results before the first turn, which nobody asked for then.
    """
    turns: list[_Turn] = []
    given: list[Message] = []
    end = 0
    for is_assistant, run in groupby(messages, key=_is_assistant):
        if is_assistant:
            recorded = tuple(run)
            if _asks(given):
                turns.append(_Turn(tuple(given), recorded, end))
                given = []
            end += len(recorded)
            continue
        for message in run:
            if given and given[-1].get("role") == message.get("role") == "user":
                turns.append(_Turn(tuple(given), (), end))
                given = []
            if turns or message.get("role") != "tool":
                given.append(message)
            end += 1
    if _asks(given):
        turns.append(_Turn(tuple(given), (), end))
    return turns


def _is_assistant(message: Message) -> bool:
    return message.get("role") == "assistant"


def _asks(given: Sequence[Message]) -> bool:
    return any(message.get("role") in ("user", "tool") for message in given)


def _rejoined(
    given: Sequence[Message], recorded: Sequence[Message], answer: Message
) -> tuple[Message, ...] | None:
    """The next messages with tool results tied to the calls of the answer; None if they do not fit.

    Every result must find a call of its name, and every call a result.
    """
    names = _recorded_names(recorded)
    calls = list(answer.get("tool_calls") or ())
    joined: list[Message] = []
    num_results = 0
    for message in given:
        if message.get("role") == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id"), "")
            if not name and num_results < len(names):
                name = list(names.values())[num_results]  # results without ids come in order
            num_results += 1
            call = next((one for one in calls if one["function"]["name"] == name), None)
            if call is None:
                return None
            calls.remove(call)
            message = {**message, "tool_call_id": call["id"]}
        joined.append(message)
    return None if calls else tuple(joined)


def _recorded_names(recorded: Sequence[Message]) -> dict[Any, str]:
    """Names of the functions that a recorded turn called, by the ids of the calls."""
    calls = [call for message in recorded for call in message.get("tool_calls") or ()]
    return {call.get("id", number): call["function"]["name"] for number, call in enumerate(calls)}
