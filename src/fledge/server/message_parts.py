"""Takes an answer apart while it arrives: reasoning, content, tool calls.

    <think> reasoning </think> content <tool_call> ... </tool_call>

What may still turn out to be a tag, or a call, is held back; what was taken for a call and is none
becomes content again, so that no text is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fledge.models.said import END_THINK, THINK
from fledge.server.call_formats import (
    CLOSE_CALL,
    OPEN_CALL,
    Call,
    CallFormat,
    may_be_calls,
    parse_hermes,
    parse_whole,
)

Place = Literal["start", "reasoning", "content", "undecided", "call", "plain"]


@dataclass(slots=True)
class Parts:
    """What became known of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class MessageSplitter:
    """The parts of one answer."""

    def __init__(
        self,
        *,
        can_think: bool,
        is_thinking: bool,
        calls: CallFormat | None,
        tool_names: Sequence[str] = (),
    ) -> None:
        """`is_thinking` when the prompt opens the reasoning; `calls` when tools were offered."""
        self._place: Place = "content"
        if can_think:
            self._place = "reasoning" if is_thinking else "start"
        self._calls, self._names = calls, tool_names
        self._held = ""
        self._has_said = False
        """Something of the present part was handed out."""

        self.has_calls = False

    def feed(self, text: str, *, is_last: bool = False) -> Parts:
        """What is certain with this piece; with the last one everything is."""
        parts = Parts()
        self._held += text
        while self._move(parts, is_last=is_last):
            pass
        if is_last:
            self._finish(parts)
        self.has_calls = self.has_calls or bool(parts.calls)
        return parts

    def _move(self, parts: Parts, *, is_last: bool) -> bool:
        """One step; whether another may follow."""
        if self._place == "start":
            begun = self._held.lstrip()
            if begun.startswith(THINK):
                self._enter("reasoning", begun.removeprefix(THINK))
            elif not THINK.startswith(begun) or is_last:
                self._enter("content", self._held)
            else:
                return False
            return True
        if self._place == "reasoning":
            return self._until(END_THINK, "content", parts)
        if self._place == "content":
            self._held = self._held.lstrip("\n") if not self._has_said else self._held
            is_whole = self._calls in ("llama3", "mistral")
            self._place = "undecided" if is_whole else "plain"
            return True
        if self._place == "undecided":
            assert self._calls is not None
            if may_be_calls(self._held, self._calls, self._names):
                return False
            self._place = "plain"
            return True
        if self._place == "call":
            return self._read_call(parts)
        if self._calls == "hermes":
            return self._until(OPEN_CALL, "call", parts)
        self._say(self._held, parts)
        self._held = ""
        return False

    def _until(self, tag: str, following: Place, parts: Parts) -> bool:
        """Hand out what comes before a tag; line breaks around it belong to nobody."""
        before, found, behind = self._held.partition(tag)
        if found:
            self._say(before.rstrip("\n"), parts)
            self._enter(following, behind)
            return True
        num_safe = len(before) - _num_begun(before, tag)
        safe = before[:num_safe].rstrip("\n")
        self._say(safe, parts)
        self._held = before[len(safe) :]
        return False

    def _read_call(self, parts: Parts) -> bool:
        inside, found, behind = self._held.partition(CLOSE_CALL)
        if not found:
            return False
        self._take_call(inside, found, parts)
        self._place, self._held = "plain", behind
        return True

    def _take_call(self, inside: str, closing: str, parts: Parts) -> None:
        calls = parse_hermes(inside)
        if calls is None:
            parts.content += OPEN_CALL + inside + closing
        else:
            parts.calls += calls

    def _finish(self, parts: Parts) -> None:
        """Nothing will follow: what is held back is what it looks like."""
        held, self._held = self._held, ""
        if self._place == "call":
            self._take_call(held, "", parts)
        elif self._place == "undecided":
            assert self._calls is not None
            calls = parse_whole(held, self._calls, self._names)
            if calls is None:
                parts.content += held
            else:
                parts.calls += calls
        elif not (self.has_calls or parts.calls) or held.strip():
            self._say(held, parts)

    def _enter(self, place: Place, held: str) -> None:
        self._place, self._held, self._has_said = place, held, False

    def _say(self, text: str, parts: Parts) -> None:
        if not self._has_said:
            text = text.lstrip("\n")
        if not text:
            return
        self._has_said = True
        if self._place == "reasoning":
            parts.reasoning += text
        else:
            parts.content += text


def _num_begun(text: str, tag: str) -> int:
    """How much of a tag the text ends with."""
    longest = min(len(tag) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
