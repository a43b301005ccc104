"""What became of the rows that were tokenized: counts that add up, and can be added up."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

MAX_REASONS = 50
"""Reasons kept apart; templates may put anything into theirs."""

_MAX_REASON_CHARS = 160
_OTHERS = "other reasons"

Reasons = dict[str, dict[str, Any]]
"""By reason: how many rows, and the id of the first."""


@dataclass(slots=True)
class TokenizeTally:
    """Counts of a run of rows. Every row is used, or counted under one of the other fates."""

    rows: int = 0
    used: int = 0
    without_answer: int = 0
    """Nothing in them was said by the target."""

    refused: int = 0
    unclear: int = 0
    cut_away: int = 0
    """All that the target said lies behind `max_tokens`."""

    samples: int = 0
    samples_cut: int = 0
    samples_dropped: int = 0
    """Cut, and nothing that the target said was left."""

    tokens_cut: int = 0
    samples_looping: int = 0
    """Ended soon after they began to go round in circles."""

    tokens_looping: int = 0
    """What that left out."""

    turns: int = 0
    """Answers of the target in the rows that are used."""

    reasons: Reasons = field(default_factory=dict)
    """Why rows were refused or unclear."""

    licences: dict[str, list[str]] = field(default_factory=dict)
    """Of each source."""

    source_rows: dict[str, int] = field(default_factory=dict)
    """Used rows of each source."""

    end_ids: list[int] = field(default_factory=list)
    """Tokens that ended an answer."""

    def count_reason(self, reason: str, row_id: str, rows: int = 1) -> None:
        """Another row that was left out for this reason."""
        short = (
            reason if len(reason) <= _MAX_REASON_CHARS else reason[: _MAX_REASON_CHARS - 1] + "…"
        )
        if short not in self.reasons and len(self.reasons) >= MAX_REASONS:
            short = _OTHERS
        entry = self.reasons.setdefault(short, {"rows": 0, "first_row": row_id})
        entry["rows"] += rows

    def add(self, other: "TokenizeTally") -> None:
        """Count the rows of another run, which come after these."""
        for one in fields(self):
            value = getattr(other, one.name)
            if isinstance(value, int):
                setattr(self, one.name, getattr(self, one.name) + value)
        for reason, entry in other.reasons.items():
            self.count_reason(reason, entry["first_row"], entry["rows"])
        for source, licences in other.licences.items():
            self.licences[source] = sorted({*self.licences.get(source, ()), *licences})
        for source, rows in other.source_rows.items():
            self.source_rows[source] = self.source_rows.get(source, 0) + rows
        self.end_ids = sorted({*self.end_ids, *other.end_ids})

    def to_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "TokenizeTally":
        return cls(**table)
