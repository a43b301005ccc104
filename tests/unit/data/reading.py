"""Reads sources as the stages do, and remembers what was said meanwhile."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import SourceSettings
from fledge.contracts.progress import Task
from fledge.data.sources import SourceReader, open_source

MAX_TURN_CHARS = 200_000


class Told:
    """A Progress that keeps notes, labels and amounts."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.totals: dict[str, int | None] = {}
        self.done: dict[str, int] = {}

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def task(self, label: str, total: int | None = None, unit: str = "bytes") -> Iterator[Task]:
        assert unit == "bytes"
        self.totals[label] = total
        self.done[label] = 0
        told = self

        class Counter:
            def advance(self, amount: int) -> None:
                told.done[label] += amount

            def update_total(self, total: int) -> None:
                told.totals[label] = total

        yield Counter()


def reader(*paths: str | Path, told: Told | None = None, **options: Any) -> SourceReader:
    """A reader of a source called `src`; options are those of settings and of `open_source`."""
    settings = SourceSettings(
        name="src",
        path=tuple(map(str, paths)),
        licence="MIT",
        format=options.pop("format", "auto"),
    )
    arguments = {"on_bad_row": "skip", "max_turn_chars": MAX_TURN_CHARS, **options}
    return open_source(settings, progress=told or Told(), **arguments)


def read(*paths: str | Path, **options: Any) -> list[Conversation]:
    return list(reader(*paths, **options))


def texts(rows: Iterable[Conversation]) -> list[str]:
    """What is said in the last message of each row."""
    return [row.messages[-1]["content"] for row in rows]


def as_lines(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text(as_lines(*rows), encoding="utf-8")
    return path


def prompts(number: int, start: int = 0) -> list[dict[str, str]]:
    return [{"id": f"p{i}", "prompt": f"prompt {i}"} for i in range(start, start + number)]
