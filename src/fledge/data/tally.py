"""What became of the rows of one source: every row read is counted in exactly one place."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class SourceTally:
    """Counts of one source; `rows_read` is the sum of all that follow it, up to `kept`."""

    rows_read: int = 0
    """Of a source with variants: its bad rows, and the variants of the others."""

    bad: int = 0
    """Malformed, empty, or with a turn that is too long."""

    private: int = 0
    """Dropped for what the privacy settings drop."""

    exact_duplicates: int = 0
    near_duplicates: int = 0
    overlaps: Counter[str] = field(default_factory=Counter)
    """Dropped for sharing text with a benchmark, by the benchmark's file."""

    kept: int = 0
    kept_bytes: int = 0
    num_files: int = 0
    """Files of kept rows on disk."""

    variants: int = 0
    """Made of the rows of the files, whatever became of them."""

    without_variants: int = 0
    """Rows of the files that have none."""

    identifiers: Counter[str] = field(default_factory=Counter)
    """Personal and financial identifiers found in the rows read, by type."""

    report: dict[str, Any] = field(default_factory=dict)
    """What the reader said about the source; there when it was read to its end."""

    @property
    def num_overlaps(self) -> int:
        return self.overlaps.total()

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: dict(sorted(value.items())) if isinstance(value, Counter) else value
            for name, value in values.items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SourceTally":
        counters = {name: Counter(values.get(name, {})) for name in ("overlaps", "identifiers")}
        return cls(**{**values, **counters})
