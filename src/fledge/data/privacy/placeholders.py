"""Stable placeholders: within one conversation a value has one placeholder, `[EMAIL_1]`.

The format is `[TYPE_n]`: the type in capitals and a number from 1 in order of appearance. It holds
no quote, backslash or line break, so a JSON string stays one. Numbers that a conversation already
holds (it was scrubbed before) are not given again.
"""

import re
from collections.abc import Mapping, Sequence

from fledge.data.privacy.finding import Finding
from fledge.data.privacy.readable import make_readable

_PLACEHOLDER = re.compile(r"\[([A-Z_]+)_([1-9][0-9]{0,8})\]")
_FORMATTING = re.compile(r"[\s().\-/_]+")
_WRITTEN_IN_GROUPS = ("phone", "card", "iban", "national_id")


class Placeholders:
    """Gives out the placeholders of one conversation."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, str], str] = {}
        self._last: dict[str, int] = {}
        self._aliases: dict[tuple[str, str], str] = {}

    def reserve(self, text: str) -> None:
        """Numbers in placeholders of this text are taken."""
        if "_" not in text or "[" not in text:
            return
        for match in _PLACEHOLDER.finditer(text):
            kind = match[1].lower()
            self._last[kind] = max(self._last.get(kind, 0), int(match[2]))

    def link(self, kind: str, aliases: Mapping[str, str]) -> None:
        """Aliases get the placeholder of the value they stand for."""
        for alias, value in aliases.items():
            self._aliases[kind, _normalised(kind, alias)] = _normalised(kind, value)

    def give(self, kind: str, value: str) -> str:
        """The placeholder of a value, the same for every way to write it."""
        plain = _normalised(kind, value)
        key = (kind, self._aliases.get((kind, plain), plain))
        if key not in self._given:
            self._last[kind] = self._last.get(kind, 0) + 1
            self._given[key] = f"[{kind.upper()}_{self._last[kind]}]"
        return self._given[key]


def redact(text: str, findings: Sequence[Finding], placeholders: Placeholders | None = None) -> str:
    """The text with a placeholder for each finding; findings are in order and do not overlap."""
    if not findings:
        return text
    if placeholders is None:
        placeholders = Placeholders()
        placeholders.reserve(text)
    pieces = []
    end = 0
    for finding in findings:
        value = text[finding.start : finding.end]
        pieces += [text[end : finding.start], placeholders.give(finding.type, value)]
        end = finding.end
    return "".join(pieces) + text[end:]


def _normalised(kind: str, value: str) -> str:
    plain = make_readable(value).text
    if kind in _WRITTEN_IN_GROUPS:
        return _FORMATTING.sub("", plain).upper()
    if kind in ("secret", "wallet"):
        return plain
    return " ".join(plain.split()).casefold()
