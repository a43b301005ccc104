"""One request of a measurement: when it was due and sent, when text came, what the server said.

Times are those of one clock that never goes back. The JSON of a stream is read here, after the
measurement, so that reading costs no measured time.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Counting = Literal["usage", "tokenizer", "chunks"]
"""How tokens are counted: by the server, by a local tokenizer, or one for each chunk."""

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why there is no whole answer."""

    kind: str
    """`busy`, `timeout`, `connection`, `stream`, `empty`, or `http 500` and such."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What our own server and engine say about drafting."""

    cycles: int
    offered_at_depth: tuple[int, ...]
    accepted_at_depth: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request."""

    due: float
    """When it should have been sent; latencies count from here."""

    sent: float
    text_times: tuple[float, ...] = ()
    """When chunks with text came."""

    end: float
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    speculation: Speculation | None = None
    failure: Failure | None = None

    @property
    def is_good(self) -> bool:
        return self.failure is None

    @property
    def ttft_s(self) -> float:
        """Time to the first text."""
        return self.text_times[0] - self.due

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first text; None when there was but one token."""
        if self.num_tokens < 2 or len(self.text_times) < 2:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between one chunk with text and the next."""
        times = self.text_times
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]

    @property
    def e2e_s(self) -> float:
        """From when it was due to the end of the stream."""
        return self.end - self.due


@dataclass(slots=True, kw_only=True)
class RawAnswer:
    """A stream as it came: events with their times, unread."""

    due: float
    sent: float
    events: list[tuple[float, bytes]]
    end: float = 0.0
    failure: Failure | None = None


def read_answer(
    raw: RawAnswer, counting: Counting, count_tokens: Callable[[str], int] | None
) -> Answer:
    """What a stream says."""
    times: list[float] = []
    texts: list[str] = []
    last: dict[str, Any] = {}
    failure, is_done = raw.failure, False
    for when, payload in raw.events:
        if payload == DONE:
            is_done = True
            continue
        try:
            chunk = json.loads(payload)
        except ValueError:
            failure = failure or Failure(kind="stream", reason="an event that is not JSON")
            break
        if not isinstance(chunk, dict) or "error" in chunk:
            failure = failure or Failure(kind="stream", reason=_said(chunk))
            break
        text = chunk_text(chunk)
        if text:
            times.append(when)
            texts.append(text)
        last |= {name: chunk[name] for name in ("usage", "fledge") if chunk.get(name)}
        is_done = is_done or _has_ended(chunk)
    if failure is None and not is_done:
        failure = Failure(kind="stream", reason="the stream broke off before its end")
    if failure is None and not times:
        failure = Failure(kind="empty", reason="an answer without text")
    usage = last.get("usage") or {}
    return Answer(
        due=raw.due,
        sent=raw.sent,
        text_times=tuple(times),
        end=raw.end,
        num_tokens=_num_tokens(counting, usage, texts, count_tokens),
        num_prompt_tokens=_whole(usage.get("prompt_tokens")),
        num_cached_tokens=_cached(usage),
        speculation=_speculation(last.get("fledge")),
        failure=failure,
    )


def chunk_text(chunk: dict[str, Any]) -> str:
    """The text of a chunk of a chat or a completion, reasoning included."""
    parts = []
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        for text in (
            choice.get("text"),
            delta.get("content"),
            delta.get("reasoning_content"),
            delta.get("reasoning"),
        ):
            if isinstance(text, str):
                parts.append(text)
    return "".join(parts)


def _has_ended(chunk: dict[str, Any]) -> bool:
    """Some servers send no [DONE]; the reason of the end says as much."""
    return any(choice.get("finish_reason") for choice in chunk.get("choices") or ())


def _num_tokens(
    counting: Counting,
    usage: dict[str, Any],
    texts: Sequence[str],
    count_tokens: Callable[[str], int] | None,
) -> int:
    if counting == "usage":
        return _whole(usage.get("completion_tokens"))
    if counting == "tokenizer" and count_tokens is not None:
        return count_tokens("".join(texts))
    return len(texts)


def _cached(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details")
    return _whole(details.get("cached_tokens")) if isinstance(details, dict) else 0


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _speculation(said: Any) -> Speculation | None:
    if not isinstance(said, dict) or not isinstance(said.get("cycles"), int):
        return None
    return Speculation(
        cycles=said["cycles"],
        offered_at_depth=tuple(said.get("offered_at_depth") or ()),
        accepted_at_depth=tuple(said.get("accepted_at_depth") or ()),
    )


def _said(chunk: Any) -> str:
    error = chunk.get("error") if isinstance(chunk, dict) else chunk
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:200]
