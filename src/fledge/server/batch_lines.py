"""The lines of a batch's input file: whether they can be asked, and what they ask."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_ERRORS = 100
"""Of a file that is wrong throughout, so many lines are named."""

_MAX_ID_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch."""

    number: int
    custom_id: str
    body: dict[str, Any]


@dataclass(slots=True)
class LineCheck:
    """What is known of a file before its first line is asked."""

    num_lines: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)


class _BadLine(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def check_lines(path: Path, endpoint: str, *, max_lines: int, max_line_bytes: int) -> LineCheck:
    """Read a whole file and name what is wrong with it, a line at a time."""
    check = LineCheck()
    seen: dict[str, int] = {}
    for number, text in _texts(path, max_line_bytes):
        check.num_lines += 1
        if check.num_lines > max_lines:
            check.errors = [_error("too_many_tasks", f"a batch holds at most {max_lines} lines.")]
            break
        try:
            line = _read(number, text, endpoint, max_line_bytes)
            if line.custom_id in seen:
                raise _BadLine(
                    "duplicate_custom_id",
                    f"custom_id {line.custom_id!r} is that of line {seen[line.custom_id]} too.",
                    "custom_id",
                )
        except _BadLine as bad:
            if len(check.errors) < MAX_ERRORS:
                check.errors.append(_error(bad.code, str(bad), bad.param, number))
        else:
            seen[line.custom_id] = number
    if not check.num_lines:
        check.errors = [_error("empty_file", "the file has no lines.")]
    return check


def read_lines(path: Path, endpoint: str, *, max_line_bytes: int) -> Iterator[Line]:
    """The requests of a file that was found to be right."""
    for number, text in _texts(path, max_line_bytes):
        yield _read(number, text, endpoint, max_line_bytes)


def _texts(path: Path, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, counted from 1; of one that is too long only the beginning."""
    number = 0
    with path.open("rb") as file:
        while text := file.readline(max_line_bytes + 1):
            number += 1
            is_cut = len(text) > max_line_bytes and not text.endswith(b"\n")
            while is_cut and (rest := file.readline(max_line_bytes)):
                is_cut = not rest.endswith(b"\n")
            if text.strip():
                yield number, text


def _read(number: int, text: bytes, endpoint: str, max_line_bytes: int) -> Line:
    if len(text) > max_line_bytes:
        raise _BadLine("line_too_long", f"the line is longer than {max_line_bytes} bytes.")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _BadLine("invalid_json_line", f"the line is not valid JSON: {error}.") from error
    if not isinstance(document, dict):
        raise _BadLine("invalid_json_line", "the line is not a JSON object.")
    custom_id = document.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_LENGTH:
        raise _BadLine(
            "missing_required_parameter",
            f"custom_id must be a text of 1 to {_MAX_ID_LENGTH} characters.",
            "custom_id",
        )
    if document.get("method") != "POST":
        raise _BadLine("invalid_method", "method must be POST.", "method")
    if document.get("url") != endpoint:
        raise _BadLine("invalid_url", f"url must be the batch's endpoint, {endpoint}.", "url")
    body = document.get("body")
    if not isinstance(body, dict):
        raise _BadLine("missing_required_parameter", "body must be a JSON object.", "body")
    return Line(number, custom_id, body)


def _error(
    code: str, message: str, param: str | None = None, line: int | None = None
) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
