"""Single tokens as text and as bytes, for logprobs: a token may be part of a character."""

import re
from functools import lru_cache

from fledge.models.tokenizer import TargetTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with.

    Printable Latin-1 stands for itself; all other bytes, in order, for what follows U+00FF.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + number): byte for number, byte in enumerate(hidden)
    }


_BYTES = _byte_alphabet()
_LINE_BREAK = next(letter for letter, byte in _BYTES.items() if byte == 0x0A)


class TokenText:
    """Looks tokens up, and remembers what it found."""

    def __init__(self, tokenizer: TargetTokenizer) -> None:
        self._tokenizer = tokenizer
        self._specials = frozenset(tokenizer.special_tokens.values())
        self._is_byte_level = self._has_byte_letters()
        self.bytes_of = lru_cache(maxsize=1 << 16)(self._bytes_of)
        self.text_of = lru_cache(maxsize=1 << 16)(self._text_of)

    def _has_byte_letters(self) -> bool:
        """Whether the vocabulary writes a line break in disguise."""
        ids = self._tokenizer.encode_all(["\n"])[0]
        return bool(ids) and self._tokenizer.spelling(ids[-1]) == _LINE_BREAK

    def _text_of(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode("utf-8", errors="replace")

    def _bytes_of(self, token_id: int) -> bytes:
        spelling = self._tokenizer.spelling(token_id)
        if token_id in self._specials:
            return spelling.encode()
        if self._is_byte_level and all(letter in _BYTES for letter in spelling):
            return bytes(_BYTES[letter] for letter in spelling)
        if match := _BYTE_TOKEN.fullmatch(spelling):
            return bytes([int(match[1], 16)])
        return spelling.replace(_SPACE, " ").encode()
