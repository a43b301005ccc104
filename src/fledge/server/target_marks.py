"""How a target marks what is not content: reasoning and tool calls, as tokens or as text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fledge.models.said import END_THINK, THINK
from fledge.models.tokenizer import TargetTokenizer
from fledge.server.call_formats import ARGS, MARKS, CallFormat, format_of

Reasoning = Literal["none", "possible", "open"]
"""Whether an answer has no reasoning, may begin with some, or is in the middle of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMarks:
    """What is known of a target's tags and marks."""

    calls: CallFormat | None
    """The format of calls that its template teaches."""

    has_args_mark: bool
    """Of Mistral's format: the newer one, where a mark stands between name and arguments."""

    can_think: bool
    special_tokens: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: TargetTokenizer) -> "TargetMarks":
        template = tokenizer.template_text
        return cls(
            calls=format_of(template),
            has_args_mark=ARGS in template,
            can_think=THINK in tokenizer.tags or THINK in template,
            special_tokens=tokenizer.special_tokens,
        )

    def reasoning_after(self, prompt_tail: str) -> Reasoning:
        """What may come first in the answer to a prompt that ends like this."""
        ending = prompt_tail.rstrip()
        if not self.can_think or ending.endswith(END_THINK):
            return "none"
        return "open" if ending.endswith(THINK) else "possible"

    def shown_token_ids(self, *, has_tools: bool) -> tuple[int, ...]:
        """Special tokens that must be part of an answer's text, to take it apart."""
        marks: Sequence[str] = (THINK, END_THINK) if self.can_think else ()
        if has_tools and self.calls is not None:
            marks = (*marks, *MARKS[self.calls])
        return tuple(
            sorted(self.special_tokens[mark] for mark in marks if mark in self.special_tokens)
        )

    def terminal(self, mark: str) -> str:
        """A mark in a grammar: its token where it is a special one, otherwise its text."""
        token_id = self.special_tokens.get(mark)
        return json.dumps(mark) if token_id is None else f"<[{token_id}]>"

    def is_token(self, mark: str) -> bool:
        return mark in self.special_tokens
