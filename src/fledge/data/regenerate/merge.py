"""From the journal to the output: rows in the order of the input, the same bytes every time."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fledge.contracts.conversation import Conversation
from fledge.contracts.progress import Progress
from fledge.data.regenerate.dialogue import Dropped
from fledge.data.regenerate.worklist import Worklist
from fledge.store.cache_publish import flush
from fledge.store.manifest import encode_json
from fledge.store.rows import dump_row, row_files, rows_file, write_rows

FAILED_NAME = "failed.jsonl"
ROWS_PER_FILE = 20_000


@dataclass(slots=True)
class Tally:
    """What became of the rows; `rows_in` is the sum of rows, dropped and failed."""

    rows_in: int = 0
    rows: int = 0
    failed: int = 0
    answers: int = 0
    cut_short: int = 0
    """Rows that ended before all recorded turns were asked."""

    dropped: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    temperatures: Counter[str] = field(default_factory=Counter)
    """Rows by temperature."""

    def add(self, row: Conversation, *, is_cut: bool) -> None:
        self.rows += 1
        self.answers += len(row.answers)
        self.cut_short += is_cut
        self.finish_reasons.update(answer.finish_reason for answer in row.answers)
        self.temperatures[str(row.answers[0].temperature)] += 1

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: dict(sorted(value.items())) if isinstance(value, Counter) else value
            for name, value in values.items()
        }


def merge(worklist: Worklist, directory: Path, progress: Progress) -> tuple[list[Path], Tally]:
    """Write all row files anew; returns them and the counts."""
    for stale in [*row_files(directory), directory / FAILED_NAME]:
        stale.unlink(missing_ok=True)
    tally = Tally(rows_in=len(worklist))
    files: list[Path] = []
    failed = directory / f".{FAILED_NAME}.tmp"
    with failed.open("wb") as failures, progress.task("writing", len(worklist), "rows") as task:

        def rows() -> Iterator[Conversation]:
            for number in range(len(worklist)):
                task.advance(1)
                reason = worklist.failure(number)
                dialogue = worklist.dialogue(number)
                if reason is not None:
                    tally.failed += 1
                    record = {"id": dialogue.id, "reason": reason}
                    failures.write(encode_json(dump_row(record) + "\n"))
                    continue
                outcome = dialogue.outcome()
                if isinstance(outcome, Dropped):
                    tally.dropped[outcome.reason] += 1
                else:
                    tally.add(outcome, is_cut=dialogue.is_cut)
                    yield outcome

        stream = rows()
        for first in stream:
            path = rows_file(directory, len(files))
            write_rows(path, chain([first], islice(stream, ROWS_PER_FILE - 1)))
            files.append(path)
    if tally.failed:
        flush(failed)
        failed.replace(directory / FAILED_NAME)
        files.append(directory / FAILED_NAME)
    else:
        failed.unlink()
    return files, tally
