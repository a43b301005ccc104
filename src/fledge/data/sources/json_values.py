"""Rows of a JSON array, or JSON values one after the other, without holding the whole text.

The decoder is asked for one value at a time. Where it fails, brackets and quotes are counted to
find the value's end: either the text at hand ends inside the value, and more is read, or the value
is wrong, and reading goes on behind it. So each character is looked at a fixed number of times.
"""

import codecs
import re
from collections.abc import Iterator

from fledge.data.sources.line_rows import DECODER, NULL_BYTE, RawRow, parse_json, too_long
from fledge.data.sources.problems import RowProblem, StreamProblem

_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,{}\[\]]")


def read_values(chunks: Iterator[bytes], *, max_row_bytes: int) -> Iterator[RawRow]:
    """Elements of the array that the text is, or the values it is made of."""
    number = 0
    text = _Window(chunks)
    try:
        in_array = text.take("[")
        while not text.is_at_end() and not (in_array and text.take("]")):
            row = text.read_row(number + 1, max_row_bytes)
            number += 1
            yield row
            if not in_array or text.take(",") or text.look() == "]":
                continue
            if not text.is_at_end():
                problem = RowProblem(
                    "not JSON", "not JSON: no comma before this row; the rest is left out"
                )
                yield RawRow(number + 1, None, problem)
            if row.problem is not None or not text.is_at_end():
                return
        if in_array and not text.is_closed:
            problem = RowProblem("not JSON", "not JSON: the array has no end")
            yield RawRow(number + 1, None, problem)
        elif not text.is_at_end():
            problem = RowProblem("not JSON", "not JSON: there is text behind the end of the array")
            yield RawRow(number + 1, None, problem)
    except StreamProblem as problem:
        yield RawRow(number + 1, None, problem)


class _Window:
    """The part of the text that is being looked at."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        # Bytes that are no UTF-8 become lone surrogates, which the row's checks find.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self._at = 0
        self._is_exhausted = False
        self.is_closed = False
        """The last character taken was a closing bracket."""

    def look(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            found = _NOT_SPACE.search(self._text, self._at)
            if found:
                self._at = found.start()
                return found.group()
            self._text, self._at = "", 0
            if not self._extend():
                return ""

    def is_at_end(self) -> bool:
        return self.look() == ""

    def take(self, character: str) -> bool:
        """Step over a character if it comes next."""
        if self.look() != character:
            return False
        self._at += 1
        self.is_closed = character == "]"
        return True

    def read_row(self, number: int, max_row_bytes: int) -> RawRow:
        start = self._at
        try:
            value, end = DECODER.raw_decode(self._text, start)
            # A number near the end of the window may go on: `1.` of `1.5` is one already.
            if self._text[start] in '{["' or _SCALAR_END.match(self._text, end):
                self._at = end
                return RawRow(number, value, None, end - start)
        except (ValueError, RecursionError):
            pass
        self._text, self._at = self._text[start:], 0
        end_or_none = self._find_end(max_row_bytes)
        if end_or_none is None:
            return RawRow(number, None, too_long(max_row_bytes))
        row, self._at = self._text[:end_or_none], end_or_none
        try:
            return RawRow(number, parse_json(row), None, len(row))
        except RowProblem as problem:
            return RawRow(number, None, NULL_BYTE if "\0" in row else problem)

    def _find_end(self, max_row_bytes: int) -> int | None:
        """Where the value at the window's start ends; None, standing behind it, if it is too long.

        At the end of the file the value ends as well.
        """
        at, depth, in_string, is_dropped = 0, 0, False, False
        is_scalar = self._text[0] not in '{["'
        while True:
            pattern = _QUOTE_OR_ESCAPE if in_string else _BRACKET_OR_QUOTE
            found = (_SCALAR_END if is_scalar else pattern).search(self._text, at)
            if found is None:
                at = max(at, len(self._text))
                if len(self._text) > max_row_bytes:
                    is_dropped = True
                    at -= len(self._text)
                    self._text = ""
                if self._extend():
                    continue
                self._at = len(self._text)
                return None if is_dropped else len(self._text)
            at, character = found.end(), found.group()
            if is_scalar:
                # A stray closing bracket is a value of its own, or nothing would ever pass it.
                at = max(found.start(), 1)
            elif character == "\\":
                at += 1
                continue
            elif character == '"':
                in_string = not in_string
            else:
                depth += 1 if character in "{[" else -1
            if is_scalar or (depth <= 0 and not in_string):
                self._at = at
                return None if is_dropped else at

    def _extend(self) -> bool:
        """Read on; False at the end of the file."""
        while not self._is_exhausted:
            chunk = next(self._chunks, None)
            self._is_exhausted = chunk is None
            more = self._decoder.decode(chunk or b"", final=self._is_exhausted)
            if more:
                self._text += more
                return True
        return False
