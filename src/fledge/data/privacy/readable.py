"""A view of a text in which patterns can look: ASCII digits, plain spaces, nothing invisible.

Identifiers hide behind full-width or Devanagari digits, no-break spaces, typographic dashes,
zero-width characters and the two-character escapes of code (`\\n`). The view undoes these and
remembers where each character came from; the text itself is never changed.
"""

import re
from typing import NamedTuple

# First of the ten digits of a script: Arabic, Persian, N'Ko, the scripts of India, Thai, Lao,
# Tibetan, Burmese, Khmer, Mongolian; then the five styles of mathematical digits.
_ZEROS = (
    *(0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xB66, 0xBE6, 0xC66, 0xCE6, 0xD66),
    *(0xE50, 0xED0, 0xF20, 0x1040, 0x17E0, 0x1810),
    *range(0x1D7CE, 0x1D800, 10),
)
_SPACES = (0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)
_DASHES = (*range(0x2010, 0x2016), 0x2212, 0xFE58, 0xFE63)
_FULL_WIDTH = range(0xFF01, 0xFF5F)
# Soft hyphen, zero-width and direction marks, variation selectors, the keycap of emoji digits.
_INVISIBLE = (
    *(0xAD, 0x180E, 0x20E3, 0xFEFF),
    *(*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070)),
    *range(0xFE00, 0xFE10),
)

_FOLDED: dict[int, str] = {
    **{zero + digit: str(digit) for zero in _ZEROS for digit in range(10)},
    **dict.fromkeys(_SPACES, " "),
    **dict.fromkeys(_DASHES, "-"),
    **{code: chr(code - 0xFEE0) for code in _FULL_WIDTH},
    0xFE6B: "@",
    0xFE52: ".",
}


def _any_of(codes: object) -> re.Pattern[str]:
    assert isinstance(codes, dict | tuple)
    return re.compile("[" + "".join(re.escape(chr(code)) for code in codes) + "]")


_ANY_FOLDED = _any_of(_FOLDED)
_ANY_INVISIBLE = _any_of(_INVISIBLE)
_ESCAPE = re.compile(r"\\[nrt_]")


class Readable(NamedTuple):
    """The view, and where its characters are in the text."""

    text: str
    offsets: list[int] | None
    """Position in the text of each character of the view; None when they are the same."""

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Where characters `start` to `end` of the view are in the text."""
        if self.offsets is None:
            return start, end
        return self.offsets[start], self.offsets[end - 1] + 1


def make_readable(text: str) -> Readable:
    """The view of a text; the text itself where there is nothing to undo."""
    if "\\" in text:
        # Two characters become two: `\n` ends a word, Markdown's `\_` is part of one.
        text = _ESCAPE.sub(lambda match: "__" if match[0] == r"\_" else "  ", text)
    if text.isascii():
        return Readable(text, None)
    if _ANY_FOLDED.search(text):
        text = text.translate(_FOLDED)
    if _ANY_INVISIBLE.search(text):
        invisible = set(map(chr, _INVISIBLE))
        offsets = [i for i, character in enumerate(text) if character not in invisible]
        return Readable("".join([text[i] for i in offsets]), offsets)
    return Readable(text, None)
