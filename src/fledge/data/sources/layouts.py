"""How a file is laid out: parquet, JSON lines, JSON values, or lines of plain text."""

from collections.abc import Callable, Iterator
from typing import BinaryIO, Literal, NamedTuple

from fledge.contracts.errors import ArtifactError
from fledge.data.sources import parquet_rows
from fledge.data.sources.byte_chunks import HEAD_BYTES, as_text, read_chunks, take_head
from fledge.data.sources.file_names import LINES_SUFFIXES, TEXT_SUFFIX, data_suffix
from fledge.data.sources.json_values import read_values
from fledge.data.sources.line_rows import RawRow, parse_json, read_lines
from fledge.data.sources.places import SourceFile
from fledge.data.sources.problems import RowProblem

_MIN_ROW_LIMIT_BYTES = 16 << 20
_BYTES_PER_CHAR = 8
"""JSON may write a character as `\\uXXXX`; the rest is for the row's other parts."""

Layout = Literal["lines", "values", "text"]


class OpenFile(NamedTuple):
    """The rows of a file, and what one is called in messages: a line or a row."""

    rows: Iterator[RawRow]
    row_word: str


def row_limit_bytes(max_turn_chars: int) -> int:
    """Rows longer than this are never held in memory; a turn of allowed length always fits."""
    return max(_MIN_ROW_LIMIT_BYTES, _BYTES_PER_CHAR * max_turn_chars)


def open_rows(
    file: SourceFile,
    stream: BinaryIO,
    *,
    is_prompt_list: bool,
    wanted_fields: frozenset[str],
    max_row_bytes: int,
    on_bytes: Callable[[int], None],
) -> OpenFile:
    """Find out how a file is laid out and begin to read it; parquet reads wanted fields only."""
    if stream.read(len(parquet_rows.MAGIC)) == parquet_rows.MAGIC:
        stream.seek(0)
        rows = parquet_rows.read_parquet(
            stream,
            name=file.name,
            num_bytes=file.size,
            wanted=wanted_fields,
            on_bytes=on_bytes,
        )
        return OpenFile(rows, "row")
    stream.seek(0)
    head, chunks = take_head(as_text(read_chunks(stream, on_bytes), file.name))
    layout = choose_layout(file.name, head, is_prompt_list=is_prompt_list)
    if layout == "values":
        return OpenFile(read_values(chunks, max_row_bytes=max_row_bytes), "row")
    is_json = layout == "lines"
    return OpenFile(read_lines(chunks, is_json=is_json, max_row_bytes=max_row_bytes), "line")


def choose_layout(name: str, head: bytes, *, is_prompt_list: bool) -> Layout:
    """What the first bytes of a text look like; names decide only where they leave it open."""
    suffix = data_suffix(name)
    lines = head.lstrip().split(b"\n")
    if len(head) >= HEAD_BYTES:
        lines.pop()  # cut off
    filled = [line for line in lines if line.strip()]
    first = head.lstrip()[:1]
    if suffix == TEXT_SUFFIX:
        return "lines" if filled and _parses_as(filled[0], dict) else "text"
    if first == b"[":
        # An array; or one array on each line, when the first is whole and others follow.
        return "lines" if len(filled) > 1 and _parses_as(filled[0], list) else "values"
    has_rows = any(line.startswith(b"{") and _parses_as(line, dict) for line in filled)
    if not first or has_rows or suffix in LINES_SUFFIXES:
        return "lines"
    if first == b"{":
        return "values"
    if first == b'"' and filled and _parses_as(filled[0], str):
        return "lines"
    if is_prompt_list:
        return "text"
    raise ArtifactError(
        f"{name} is neither JSON, JSON lines nor parquet; it begins with "
        f"{head[:40].decode(errors='replace')!r}. A list of prompts, one on each line, has a name "
        'that ends in .txt, or `format = "prompts"` in the recipe.'
    )


def _parses_as(line: bytes, kind: type) -> bool:
    try:
        return isinstance(parse_json(line.decode()), kind)
    except (UnicodeDecodeError, RowProblem):
        return False
