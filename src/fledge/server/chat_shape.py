"""Chats as their endpoint writes them: messages with content, reasoning and tool calls."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fledge.contracts.outputs import TokenLogprobs
from fledge.server.call_reader import merged, whole_calls
from fledge.server.logprob_shapes import chat_logprobs
from fledge.server.message_parts import MessageSplitter, Parts
from fledge.server.shapes import MARK, NOTHING_ELSE, ChoiceState, Envelope, ShapeOptions
from fledge.server.token_origins import split_by_token
from fledge.server.token_text import TokenText
from fledge.server.wire import Finish, Piece, TokenOrigin

MakeSplitter = Callable[[], MessageSplitter]


class ChatShape:
    """`chat.completion` and `chat.completion.chunk`"""

    def __init__(
        self,
        options: ShapeOptions,
        token_text: TokenText,
        make_splitter: MakeSplitter | None,
        *,
        is_stream: bool,
    ) -> None:
        """Without `make_splitter` an answer is nothing but content."""
        kind = "chat.completion.chunk" if is_stream else "chat.completion"
        self._envelope = Envelope("chatcmpl", kind, options)
        self._token_text = token_text
        self._make_splitter = make_splitter
        self._splitters: dict[int, MessageSplitter] = {}
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[ChoiceState]) -> dict[str, Any]:
        entries = [self._entry(index, state) for index, state in enumerate(choices)]
        return self._envelope.response(entries, choices)

    def _entry(self, index: int, state: ChoiceState) -> dict[str, Any]:
        assert state.finish is not None
        parts, tokens = self._take_apart(index, state.text, state.origins, is_last=True)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content, "refusal": None}
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = whole_calls(parts.calls)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(state.logprobs),
            "finish_reason": self._reason(index, state.finish),
            **self._envelope.ids(state.token_ids, state, is_first=True),
            **self._envelope.tokens(tokens),
        }

    def chunk(self, index: int, piece: Piece, choices: Sequence[ChoiceState]) -> bytes:
        """An event, or nothing while what arrived may still be anything."""
        is_first = index not in self._begun
        is_last = piece.finish is not None
        parts, tokens = self._take_apart(index, piece.text, piece.origins or (), is_last=is_last)
        if self._envelope.is_plain and piece.finish is None:
            if not parts:
                return b""
            if not (is_first or parts.reasoning or parts.calls):
                entry: dict[str, Any] = {"index": index, "delta": {"content": MARK}, **NOTHING_ELSE}
                return self._envelope.quick_event(index, entry, parts.content)
        self._begun.add(index)
        entry = {
            "index": index,
            "delta": self._delta(index, parts, is_first=is_first),
            "logprobs": self._logprobs(piece.logprobs or ()),
            "finish_reason": self._reason(index, piece.finish) if piece.finish else None,
            **self._envelope.ids(piece.token_ids, choices[index], is_first=is_first),
            **self._envelope.tokens(tokens),
        }
        return self._envelope.event(entry, choices)

    def last_chunk(self, choices: Sequence[ChoiceState]) -> bytes | None:
        return self._envelope.last_event(choices)

    def _delta(self, index: int, parts: Parts, *, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if parts.reasoning:
            delta["reasoning_content"] = parts.reasoning
        if parts.content or (is_first and not parts):
            delta["content"] = parts.content
        if parts.calls:
            delta["tool_calls"] = [call.to_json() for call in merged(parts.calls)]
        return delta

    def _take_apart(
        self, index: int, text: str, origins: Sequence[TokenOrigin], *, is_last: bool
    ) -> tuple[Parts, list[dict[str, Any]]]:
        """The parts of a text and, where their origins are known, of its tokens."""
        if not origins:
            return self._split(index, text, is_last=is_last), []
        return split_by_token(origins, partial(self._split, index), is_last=is_last)

    def _split(self, index: int, text: str, *, is_last: bool) -> Parts:
        if self._make_splitter is None:
            return Parts(content=text)
        splitter = self._splitters.get(index)
        if splitter is None:
            splitter = self._splitters[index] = self._make_splitter()
        return splitter.feed(text, is_last=is_last)

    def _reason(self, index: int, finish: Finish) -> str:
        splitter = self._splitters.get(index)
        has_called = splitter is not None and splitter.has_calls
        return "tool_calls" if has_called and finish.reason == "stop" else finish.reason

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._envelope.options.has_logprobs:
            return None
        return chat_logprobs(tokens, self._token_text)
