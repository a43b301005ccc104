"""Rows on disk: JSON lines in numbered files, each complete when its name is there.

A file is written under a hidden name, flushed and renamed, so a killed run leaves whole files and
at most one hidden leftover.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fledge.contracts.conversation import Conversation
from fledge.contracts.errors import ArtifactError
from fledge.store.cache_publish import flush
from fledge.store.manifest import encode_json

ROWS_PATTERN = "rows-*.jsonl"
_ID = re.compile(rb'\{"id":("(?:[^"\\]|\\.)*")')


def rows_file(directory: Path, number: int) -> Path:
    return directory / f"rows-{number:05d}.jsonl"


def row_files(directory: Path) -> list[Path]:
    """The row files of a directory, in order."""
    return sorted(directory.glob(ROWS_PATTERN), key=lambda path: (len(path.name), path.name))


def dump_row(row: dict[str, Any]) -> str:
    """One line without its end; any language stays readable."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"))


def row_line(row: Conversation) -> bytes:
    """A row as it stands in a file, the line's end included."""
    return encode_json(dump_row(row.to_json()) + "\n")


def id_field(line: bytes) -> bytes:
    """The id of a row as JSON, without reading the rest of its line."""
    found = _ID.match(line)
    if found is None:
        raise ArtifactError(f"this is not a row that fledge wrote: {line[:200]!r}")
    return found[1]


def write_rows(path: Path, rows: Iterable[Conversation]) -> int:
    """Write one file that appears whole or not at all; returns how many rows it has."""
    temporary = path.with_name(f".{path.name}.tmp")
    count = 0
    with temporary.open("wb") as file:
        for row in rows:
            file.write(row_line(row))
            count += 1
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)
    return count


def read_rows(directory: Path) -> Iterator[Conversation]:
    """Every conversation of a finished directory, in order."""
    for path in row_files(directory):
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield Conversation.from_json(json.loads(line))
                except (ValueError, ArtifactError) as error:
                    raise ArtifactError(f"{path}, line {number} is damaged: {error}") from error
