"""Tokens of an answer one by one, with how each came: drafted at some depth, or the target's own.

What a token shows may be less than it says: the rest of a character, of a stop text or of a tag may
be missing. Such text is shown with the token that settles it, so the texts always add up.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from fledge.server.message_parts import Parts
from fledge.server.wire import TokenOrigin


class Split(Protocol):
    """Takes an answer apart, piece after piece."""

    def __call__(self, text: str, *, is_last: bool) -> Parts: ...


def token_entry(origin: TokenOrigin) -> dict[str, Any]:
    return {"text": origin.text, "draft_depth": origin.draft_depth}


def split_by_token(
    origins: Sequence[TokenOrigin], split: Split, *, is_last: bool
) -> tuple[Parts, list[dict[str, Any]]]:
    """The parts of a piece, and what each of its tokens added to content and reasoning."""
    whole, entries = Parts(), []
    for number, origin in enumerate(origins, start=1):
        parts = split(origin.text, is_last=is_last and number == len(origins))
        whole.content += parts.content
        whole.reasoning += parts.reasoning
        whole.calls += parts.calls
        entry = token_entry(TokenOrigin(parts.content, origin.draft_depth))
        if parts.reasoning:
            entry["reasoning"] = parts.reasoning
        entries.append(entry)
    return whole, entries
