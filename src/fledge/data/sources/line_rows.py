"""Files with one row on each line, in memory bounded by the longest line allowed."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from fledge.data.sources.problems import RowProblem, StreamProblem

NULL_BYTE = RowProblem("null byte", "it contains a null byte")


class RawRow(NamedTuple):
    """A row as it is in the file, before anyone knows its schema."""

    number: int
    """Line number in files of lines, row number in others; from 1."""

    value: Any
    problem: RowProblem | None = None
    num_bytes: int = 0


def read_lines(chunks: Iterator[bytes], *, is_json: bool, max_row_bytes: int) -> Iterator[RawRow]:
    """One row for each line that is not blank: a JSON value, or the line's text."""
    number = 0
    try:
        for number, line in enumerate(_split(chunks, max_row_bytes), start=1):
            if line is None:
                yield RawRow(number, None, too_long(max_row_bytes))
            elif stripped := line.strip():
                yield _read_line(number, stripped, is_json)
    except StreamProblem as problem:
        yield RawRow(number + 1, None, problem)


def parse_json(text: str) -> Any:
    """A JSON value; what Python alone takes for JSON is a problem too."""
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"its line {error.lineno}"
        raise RowProblem("not JSON", f"not JSON: {error.msg} at {where}") from error
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise RowProblem("not JSON", f"not JSON: {error}") from error
    except RecursionError as error:
        raise RowProblem("nested too deeply", "its JSON is nested too deeply") from error


def too_long(max_row_bytes: int) -> RowProblem:
    return RowProblem("row too long", f"the row is longer than {max_row_bytes:,} bytes")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _read_line(number: int, line: bytes, is_json: bool) -> RawRow:
    try:
        text = line.decode()
        return RawRow(number, parse_json(text) if is_json else text, None, len(line))
    except UnicodeDecodeError as error:
        problem = RowProblem("not UTF-8", f"not UTF-8: {error.reason} at byte {error.start + 1}")
        return RawRow(number, None, problem)
    except RowProblem as problem:
        return RawRow(number, None, NULL_BYTE if b"\0" in line else problem)


def _split(chunks: Iterator[bytes], max_row_bytes: int) -> Iterator[bytes | None]:
    """The lines; None for one that is too long, of which nothing is kept."""
    pending: list[bytes] = []
    pending_bytes = 0
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        pending_bytes += len(first)
        if pending_bytes <= max_row_bytes:
            pending.append(first)
        else:
            pending.clear()
        if not others:
            continue
        yield b"".join(pending) if pending_bytes <= max_row_bytes else None
        *whole, last = others
        for line in whole:
            yield line if len(line) <= max_row_bytes else None
        pending, pending_bytes = [last], len(last)
    if pending_bytes > max_row_bytes:
        yield None
    elif pending_bytes:
        yield b"".join(pending)
