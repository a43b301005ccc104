"""Logprobs in the two shapes that OpenAI's API has for them."""

from collections.abc import Sequence
from typing import Any

from fledge.contracts.outputs import TokenLogprobs
from fledge.server.token_text import TokenText

_LEAST = -9999.0
"""Stands for a probability of zero, which JSON cannot write as a logprob."""


def chat_logprobs(tokens: Sequence[TokenLogprobs], text: TokenText) -> dict[str, Any]:
    """Of a chat: a list of tokens, each with its alternatives."""
    content = [
        {
            **_entry(one.token_id, one.logprob, text),
            "top_logprobs": [_entry(token_id, logprob, text) for token_id, logprob in one.top],
        }
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[TokenLogprobs], text: TokenText, start: int
) -> dict[str, Any]:
    """Of a completion: parallel lists; `start` is where the first token begins in the text."""
    texts = [text.text_of(one.token_id) for one in tokens]
    offsets = []
    for one in texts:
        offsets.append(start)
        start += len(one)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(one.logprob) for one in tokens],
        "top_logprobs": [_alternatives(one, text) for one in tokens],
        "text_offset": offsets,
    }


def _entry(token_id: int, logprob: float, text: TokenText) -> dict[str, Any]:
    return {
        "token": text.text_of(token_id),
        "logprob": _finite(logprob),
        "bytes": list(text.bytes_of(token_id)),
    }


def _alternatives(one: TokenLogprobs, text: TokenText) -> dict[str, float]:
    """The most probable tokens, and the one that was chosen."""
    found: dict[str, float] = {}
    for token_id, logprob in (*one.top, (one.token_id, one.logprob)):
        # Two tokens may look the same as text; the more probable one comes first.
        found.setdefault(text.text_of(token_id), _finite(logprob))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
