"""Answers as the two endpoints write them, whole or chunk by chunk."""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fledge.contracts.outputs import TokenLogprobs
from fledge.server.api_errors import dump
from fledge.server.figures import speculation, usage
from fledge.server.logprob_shapes import completion_logprobs
from fledge.server.token_origins import token_entry
from fledge.server.token_text import TokenText
from fledge.server.wire import Finish, Piece, TokenOrigin

MARK = "@"
_TEXT_MARK = b'"@"'
_encode = json.JSONEncoder(ensure_ascii=False).encode
"""`json.dumps` makes an encoder for every call, and this is called for every chunk."""

NOTHING_ELSE = {"logprobs": None, "finish_reason": None}


@dataclass(slots=True)
class ChoiceState:
    """What is known of one choice so far."""

    prompt_token_ids: tuple[int, ...]
    echo: str = ""
    """What the text of a completion begins with: its prompt, if that was asked for."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or ()
        self.origins += piece.origins or ()
        self.finish = piece.finish

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeOptions:
    """What the client wants to see."""

    model: str
    has_logprobs: bool
    has_token_ids: bool
    has_usage: bool
    """In a stream: a last chunk with usage."""

    has_usage_always: bool
    """In a stream: usage in every chunk."""

    num_choices: int
    """To each prompt."""

    has_origins: bool = False
    """Tokens one by one, with the depth at which each was drafted."""


class Shape(Protocol):
    """How one endpoint writes its answers."""

    def whole(self, choices: Sequence[ChoiceState]) -> dict[str, Any]:
        """The response to a request that does not stream."""

    def chunk(self, index: int, piece: Piece, choices: Sequence[ChoiceState]) -> bytes:
        """One event of a stream; the piece is part of its choice already."""

    def last_chunk(self, choices: Sequence[ChoiceState]) -> bytes | None:
        """The event with the usage, if it was asked for."""


class Envelope:
    """What both endpoints wrap around choices."""

    def __init__(self, prefix: str, kind: str, options: ShapeOptions) -> None:
        self.options = options
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self.head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": options.model,
        }

    def response(self, entries: list[Any], choices: Sequence[ChoiceState]) -> dict[str, Any]:
        return {
            **self.head,
            "choices": entries,
            "usage": self.usage(choices),
            "system_fingerprint": None,
            "fledge": speculation([one.finish.stats for one in choices if one.finish]),
        }

    def event(self, entry: dict[str, Any], choices: Sequence[ChoiceState]) -> bytes:
        document = {**self.head, "choices": [entry]}
        if self.options.has_usage:
            document["usage"] = self.usage(choices) if self.options.has_usage_always else None
        state = choices[entry["index"]]
        if state.finish is not None:
            document["fledge"] = speculation([state.finish.stats])
        return _event(document)

    @property
    def is_plain(self) -> bool:
        """Chunks carry nothing beside their text."""
        options = self.options
        return not (
            options.has_logprobs
            or options.has_token_ids
            or options.has_usage_always
            or options.has_origins
        )

    def quick_event(self, index: int, entry: dict[str, Any], text: str) -> bytes:
        """An event that differs from the last such one in its text only, as most do.

        `entry` has the mark where the text goes.
        """
        frame = self._frames.get(index)
        if frame is None:
            document: dict[str, Any] = {**self.head, "choices": [entry]}
            if self.options.has_usage:
                document["usage"] = None
            # The name of the model may hold anything, so the mark is looked for from the end.
            start, _, end = _event(document).rpartition(_TEXT_MARK)
            frame = self._frames[index] = (start, end)
        return frame[0] + _text(text) + frame[1]

    def last_event(self, choices: Sequence[ChoiceState]) -> bytes | None:
        if not self.options.has_usage:
            return None
        stats = [one.finish.stats for one in choices if one.finish]
        return _event(
            {
                **self.head,
                "choices": [],
                "usage": self.usage(choices),
                "fledge": speculation(stats),
            }
        )

    def usage(self, choices: Sequence[ChoiceState]) -> dict[str, Any]:
        """Each prompt counts once, however many answers it gets."""
        firsts = choices[:: self.options.num_choices]
        cached = sum(one.finish.stats.num_prompt_reused for one in firsts if one.finish)
        return usage(
            sum(len(one.prompt_token_ids) for one in firsts),
            sum(len(one.token_ids) for one in choices),
            cached,
        )

    def ids(
        self, piece_ids: Sequence[int], state: ChoiceState, *, is_first: bool
    ) -> dict[str, Any]:
        if not self.options.has_token_ids:
            return {}
        ids: dict[str, Any] = {"token_ids": list(piece_ids)}
        if is_first:
            ids["prompt_token_ids"] = list(state.prompt_token_ids)
        return ids

    def tokens(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        return {"tokens": entries} if self.options.has_origins else {}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + dump(document) + b"\n\n"


class CompletionShape:
    """`text_completion`, whole and in chunks"""

    def __init__(self, options: ShapeOptions, token_text: TokenText) -> None:
        self._envelope = Envelope("cmpl", "text_completion", options)
        self._token_text = token_text
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[ChoiceState]) -> dict[str, Any]:
        entries = []
        for index, state in enumerate(choices):
            assert state.finish is not None
            entries.append(
                {
                    "index": index,
                    "text": state.echo + state.text,
                    "logprobs": self._logprobs(index, state.logprobs),
                    "finish_reason": state.finish.reason,
                    **self._envelope.ids(state.token_ids, state, is_first=True),
                    **self._envelope.tokens([token_entry(one) for one in state.origins]),
                }
            )
        return self._envelope.response(entries, choices)

    def chunk(self, index: int, piece: Piece, choices: Sequence[ChoiceState]) -> bytes:
        is_first = index not in self._begun
        self._begun.add(index)
        text = choices[index].echo + piece.text if is_first else piece.text
        if self._envelope.is_plain and piece.finish is None:
            entry: dict[str, Any] = {"index": index, "text": MARK, **NOTHING_ELSE}
            return self._envelope.quick_event(index, entry, text)
        entry = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, piece.logprobs or ()),
            "finish_reason": piece.finish.reason if piece.finish else None,
            **self._envelope.ids(piece.token_ids, choices[index], is_first=is_first),
            **self._envelope.tokens([token_entry(one) for one in piece.origins or ()]),
        }
        self._offsets[index] = self._offsets.get(index, 0) + len(piece.text)
        return self._envelope.event(entry, choices)

    def last_chunk(self, choices: Sequence[ChoiceState]) -> bytes | None:
        return self._envelope.last_event(choices)

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._envelope.options.has_logprobs:
            return None
        return completion_logprobs(tokens, self._token_text, self._offsets.get(index, 0))


def _text(text: str) -> bytes:
    return _encode(text).encode("utf-8", errors="replace")
