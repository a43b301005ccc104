"""What an answer must look like, as a request states it."""

from dataclasses import dataclass, field
from typing import Literal

from fledge.contracts.errors import ConfigError

GrammarKind = Literal["json_schema", "regex", "lark"]

MAX_GRAMMAR_BYTES = 64 << 10
"""Longer ones are refused: how long a grammar takes to compile grows with it."""

WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the parts of JSON. Without a limit a small target may write line breaks for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A language that the whole answer belongs to, up to its end-of-text token."""

    kind: GrammarKind
    """A JSON schema, a regular expression, or a grammar in the dialect of Lark that llguidance
    reads (with `%json` for schemas and `<[7]>` for token 7)."""

    text: str

    is_lenient: bool = False
    """Of a JSON schema: ignore keywords that cannot be followed, instead of refusing them."""

    source: str = field(default="", compare=False)
    """The parameter that asks for it, for messages."""

    def __post_init__(self) -> None:
        size = len(self.text.encode("utf-8", errors="replace"))
        if size > MAX_GRAMMAR_BYTES:
            raise ConfigError(
                f"the grammar has {size} bytes and may have {MAX_GRAMMAR_BYTES}; make it smaller."
            )
