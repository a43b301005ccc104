"""Measurements of a run, one line each, so that a run that breaks goes on behind the last.

    {"arm": "head", "point": {...}, "repeat": 0, "lost": null, "figures": {...}, "answers": [...]}

A measurement that was cut short is kept with the reason under `lost`, and made again later.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.contracts.errors import ArtifactError
from fledge.lab.load_answer import Answer
from fledge.lab.load_point import Point
from fledge.store.capacity import translated_disk_errors

JOURNAL_NAME = "measurements.jsonl"
_ANSWER = ("due_s", "sent_s", "ttft_s", "tpot_s", "e2e_s", "tokens", "failure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One load, applied once to one arm."""

    arm: str
    point: Point
    repeat: int
    figures: dict[str, Any]
    lost: str | None = None

    @property
    def key(self) -> tuple[str, Point, int]:
        return self.arm, self.point, self.repeat


def has_measurements(directory: Path) -> bool:
    """Whether anything was written down; a server that could not be reached leaves nothing."""
    journal = directory / JOURNAL_NAME
    return journal.exists() and journal.stat().st_size > 0


class BenchJournal:
    """Appends measurements, and knows those of earlier runs."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL_NAME
        self.client: dict[str, Any] | None = None
        """What the client can take, measured once for a run."""

        self.facts: dict[str, dict[str, Any]] = {}
        self._found: dict[tuple[str, Point, int], Measurement] = {}
        self._read()

    @property
    def path(self) -> Path:
        return self._path

    @property
    def measurements(self) -> list[Measurement]:
        """The newest of each, those that were cut short included."""
        return list(self._found.values())

    def has(self, key: tuple[str, Point, int]) -> bool:
        """Whether it was measured to its end."""
        return key in self._found and self._found[key].lost is None

    def add(self, measurement: Measurement, answers: Sequence[Answer]) -> None:
        self._found[measurement.key] = measurement
        self._append(
            {
                "arm": measurement.arm,
                "point": measurement.point.to_json(),
                "repeat": measurement.repeat,
                "lost": measurement.lost,
                "figures": measurement.figures,
                "answer_fields": _ANSWER,
                "answers": _rows(answers),
            }
        )

    def add_client(self, figures: dict[str, Any]) -> None:
        self.client = figures
        self._append({"client": figures})

    def add_facts(self, arm: str, facts: dict[str, Any]) -> None:
        if self.facts.get(arm) != facts:
            self.facts[arm] = facts
            self._append({"facts": facts, "arm": arm})

    def _append(self, line: dict[str, Any]) -> None:
        with translated_disk_errors(self._path, place="output"), self._path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> None:
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self._path, whole)  # a kill cut the last line short
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ArtifactError(
                    f"{self._path}, line {number} is damaged; remove the line: only that "
                    "measurement is lost."
                ) from error

    def _take(self, line: dict[str, Any]) -> None:
        if "client" in line:
            self.client = line["client"]
        elif "facts" in line:
            self.facts[line["arm"]] = line["facts"]
        else:
            measurement = Measurement(
                arm=line["arm"],
                point=Point(line["point"]["kind"], line["point"]["level"]),
                repeat=line["repeat"],
                figures=line["figures"],
                lost=line["lost"],
            )
            self._found[measurement.key] = measurement


def _rows(answers: Sequence[Answer]) -> list[list[Any]]:
    """Answers without the times of their tokens, which would be most of the file."""
    start = min((answer.due for answer in answers), default=0.0)
    return [
        [
            _short(answer.due - start),
            _short(answer.sent - start),
            _short(answer.ttft_s) if answer.text_times else None,
            _short(answer.tpot_s),
            _short(answer.e2e_s),
            answer.num_tokens,
            None if answer.failure is None else answer.failure.kind,
        ]
        for answer in answers
    ]


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
