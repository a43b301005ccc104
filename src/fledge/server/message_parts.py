"""Takes an answer apart while it arrives: reasoning, content, tool calls.

    <think> reasoning </think> content <tool_call> ... </tool_call>

What may still turn out to be a tag, or a call, is held back; what was taken for a call and is none
becomes content again, so that no text is lost. A call is handed out while it is written, as soon as
its name is known and its arguments begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fledge.models.said import END_THINK, THINK
from fledge.server.call_formats import OPENINGS, CallFormat, may_be_calls
from fledge.server.call_reader import CallDelta, CallReader, head_pattern

Place = Literal["start", "reasoning", "content", "undecided", "calls", "plain"]


@dataclass(slots=True)
class Parts:
    """What became known of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

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
        max_calls: int | None = None,
    ) -> None:
        """`is_thinking` when the prompt opens the reasoning; `calls` when tools were offered."""
        self._place: Place = "content"
        if can_think:
            self._place = "reasoning" if is_thinking else "start"
        self._calls, self._names, self._max_calls = calls, tool_names, max_calls
        self._reader: CallReader | None = None
        self._mark = ""
        """What the calls were opened with."""

        self._num_calls = 0
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
            return self._decide()
        if self._place == "calls":
            return self._read_calls(parts)
        if self._calls is not None:
            self._mark = OPENINGS[self._calls]
            return self._until(self._mark, "calls", parts)
        self._say(self._held, parts)
        self._held = ""
        return False

    def _decide(self) -> bool:
        """Whether an answer without a mark is calls; whether that is known."""
        assert self._calls is not None
        match = head_pattern(self._calls, self._names).match(self._held)
        if match is not None:
            self._mark, self._place = "", "calls"
            return True
        if may_be_calls(self._held, self._calls, self._names):
            return False
        self._place = "plain"
        return True

    def _read_calls(self, parts: Parts) -> bool:
        """Whatever is held belongs to the calls, until they are over."""
        assert self._calls is not None
        if self._reader is None:
            self._reader = CallReader(
                self._calls,
                self._names,
                first_index=self._num_calls,
                max_calls=self._max_calls,
            )
        reader = self._reader
        held, self._held = self._held, ""
        parts.calls += reader.feed(held)
        if not reader.is_over:
            return False
        self._held = reader.behind
        self._leave_calls(reader, parts)
        return True

    def _leave_calls(self, reader: CallReader, parts: Parts) -> None:
        if reader.failed is not None:
            parts.content += self._mark + reader.failed
        self._num_calls = reader.next_index
        self._reader, self._place = None, "plain"

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

    def _finish(self, parts: Parts) -> None:
        """Nothing will follow: what is held back is what it looks like."""
        if self._place == "undecided":
            # Nothing but whole calls, or a text like any other.
            self._mark, self._place = "", "calls"
            self._read_calls(parts)
        if self._place == "calls" and self._reader is not None:
            parts.calls += self._reader.finish()
            self._leave_calls(self._reader, parts)
        held, self._held = self._held, ""
        if not (self.has_calls or parts.calls) or held.strip():
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
