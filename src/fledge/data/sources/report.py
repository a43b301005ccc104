"""What reading a source found: counts, bad rows by reason, and the schema of each file."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fledge.data.sources.id_ledger import IdLedger

MAX_BAD_SHOWN = 20


class BadRow(NamedTuple):
    """A row that could not be used."""

    file: str
    line: int
    """Line number in files of lines, row number in JSON arrays and parquet; from 1."""

    reason: str


class FileSchema(NamedTuple):
    """What a file was taken for."""

    name: str
    sentence: str


@dataclass(slots=True)
class SourceReport:
    """Grows while a source is read; a resumed reader counts the rows it skips as well."""

    rows_read: int = 0
    """All rows, good and bad."""

    rows_bad: int = 0
    bad: list[BadRow] = field(default_factory=list)
    """The first of them."""

    bad_by_reason: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    """As they are stored, compressed or not."""

    schemas: dict[str, FileSchema] = field(default_factory=dict)
    """By file."""

    ids: IdLedger = field(default_factory=IdLedger, repr=False)

    @property
    def duplicate_ids(self) -> int:
        """Rows whose own id occurred before in the source."""
        return self.ids.count_repeats()

    def add_bad(self, row: BadRow, kind: str) -> None:
        """Count a bad row under the kind of its reason."""
        self.rows_bad += 1
        self.bad_by_reason[kind] += 1
        if len(self.bad) < MAX_BAD_SHOWN:
            self.bad.append(row)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows_read": self.rows_read,
            "rows_bad": self.rows_bad,
            "bad": [row._asdict() for row in self.bad],
            "bad_by_reason": dict(self.bad_by_reason),
            "bytes_read": self.bytes_read,
            "schemas": {file: schema._asdict() for file, schema in self.schemas.items()},
            "duplicate_ids": self.duplicate_ids,
        }
