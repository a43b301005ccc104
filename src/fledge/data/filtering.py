"""The first pass of prepare: every source, row by row, through the filters to files on disk.

After each file of kept rows the index of duplicates is committed together with the position and the
counts, in one transaction. A run that was killed goes on after the last such point: what lies
beyond it is removed and made again, so the files and counts are those of an unbroken run.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from fledge.contracts.conversation import Conversation
from fledge.contracts.data_settings import PrepareSettings, SelfSettings, SourceSettings
from fledge.contracts.errors import ConfigError
from fledge.contracts.progress import Progress
from fledge.data.duplicates import DuplicateIndex
from fledge.data.examination import Examination, Examined
from fledge.data.row_files import MAX_BYTES, RowFiles, remove_from
from fledge.data.self_examples import MOST_CHARS, read_examples
from fledge.data.self_filter import SelfPromptReport
from fledge.data.sources import SourceReport, open_source
from fledge.data.tally import SourceTally
from fledge.store.rows import row_line


class SelfPrompts(Protocol):
    """Whoever writes prompts for sources with the path `self`."""

    def __call__(
        self,
        source: SourceSettings,
        settings: SelfSettings,
        seed: int,
        examples: Sequence[str],
    ) -> Iterable[Conversation]:
        """The same rows in the same order, whenever it is called with the same arguments.

        `examples` are prompts of the source that it is to be like, and empty without one.
        """

    def report(self, source_name: str) -> SelfPromptReport:
        """How the writing went, from the first row on."""


ROWS_PER_SAVE = 5_000
"""Rows read between two points from which a run can go on. It is a count, not a time, so that the
index is built by the same steps, and takes the same bytes, however often a run was interrupted."""


class Reader(Protocol):
    """The rows of a source and what was found on the way."""

    report: SourceReport

    def __iter__(self) -> Iterator[Conversation]: ...


class SelfReader:
    """Prompts that the target writes, as a source like any other."""

    def __init__(self, rows: Iterable[Conversation], skip_rows: int) -> None:
        self.report = SourceReport()
        self._rows = rows
        self._skip_rows = skip_rows

    def __iter__(self) -> Iterator[Conversation]:
        for row in self._rows:
            self.report.rows_read += 1
            if self.report.rows_read > self._skip_rows:
                yield row


def decide(examined: Examined, index: DuplicateIndex, tally: SourceTally) -> Conversation | None:
    """The row as it is kept, or None; every row is counted in one place of the tally.

    Filters count in this order: privacy, duplicates, benchmarks.
    """
    tally.identifiers.update(examined.found)
    if examined.kept is None or examined.trace is None:
        tally.private += 1
        return None
    duplicate = index.check_trace(examined.trace)
    if duplicate is not None:
        tally.exact_duplicates += duplicate == "exact"
        tally.near_duplicates += duplicate == "near"
        return None
    if examined.benchmark is not None:
        tally.overlaps[examined.benchmark] += 1
        return None
    tally.kept += 1
    return examined.kept


class FilterPass:
    """Goes through the sources of a recipe, from wherever an earlier run stopped."""

    def __init__(
        self,
        settings: PrepareSettings,
        work: Path,
        index: DuplicateIndex,
        examination: Examination,
        *,
        self_prompts: SelfPrompts | None,
        progress: Progress,
        rows_per_save: int = ROWS_PER_SAVE,
    ) -> None:
        self._settings = settings
        self._work = work
        self._index = index
        self._examination = examination
        self._self_prompts = self_prompts
        self._progress = progress
        self._rows_per_save = rows_per_save
        position = index.position or {"rows_read": 0, "tallies": [{}]}
        self._skip_rows: int = position["rows_read"]
        self.tallies = [SourceTally.from_json(values) for values in position["tallies"]]
        """Of the sources that are done, and of the one being read."""

    def run(self) -> list[SourceTally]:
        """Filter what is left; returns the counts of all sources."""
        for number, source in enumerate(self._settings.sources):
            if number >= len(self.tallies) - 1:
                self._filter(number, source)
        return self.tallies[: len(self._settings.sources)]

    def _filter(self, number: int, source: SourceSettings) -> None:
        tally = self.tallies[number]
        directory = source_directory(self._work, number)
        remove_from(directory, tally.num_files)
        reader = self._open(source, self._skip_rows)
        # Rows may be read ahead of those that are decided, so each brings its number along.
        numbered = ((reader.report.rows_read, row) for row in reader)
        with closing(RowFiles(directory, first=tally.num_files)) as files:
            num_unsaved = 0
            for row in self._examination.examine(numbered):
                for examined in row.outcomes:
                    kept = decide(examined, self._index, tally)
                    if kept is not None:
                        files.write(row_line(kept))
                if source.variants:
                    tally.variants += len(row.outcomes)
                    tally.without_variants += not row.outcomes
                num_unsaved += 1
                if num_unsaved >= self._rows_per_save or files.num_bytes >= MAX_BYTES:
                    self._save(files, tally, row.number)
                    num_unsaved = 0
            tally.report = reader.report.to_json()
            if source.is_self and self._self_prompts is not None:
                tally.report["self_prompts"] = asdict(self._self_prompts.report(source.name))
            tally.rows_read, tally.bad = reader.report.rows_read, reader.report.rows_bad
            if source.variants:
                tally.rows_read = tally.bad + tally.variants
            self.tallies.append(SourceTally())
            self._skip_rows = 0
            self._save(files, tally, 0)

    def _save(self, files: RowFiles, tally: SourceTally, rows_read: int) -> None:
        tally.kept_bytes += files.num_bytes
        files.publish()
        tally.num_files = files.number
        tallies = [one.to_json() for one in self.tallies]
        self._index.commit({"rows_read": rows_read, "tallies": tallies})

    def _open(self, source: SourceSettings, skip_rows: int) -> Reader:
        if not source.is_self:
            return open_source(
                source,
                on_bad_row=self._settings.on_bad_row,
                max_turn_chars=self._settings.max_turn_chars,
                progress=self._progress,
                skip_rows=skip_rows,
            )
        if self._self_prompts is None:
            raise ConfigError(
                f"source {source.name} takes its prompts from the target, and no target is there "
                "to write them."
            )
        settings = self._settings
        asked = source.self_settings(settings.self_prompts)
        rows = self._self_prompts(source, asked, settings.seed, self._examples(source, asked))
        return SelfReader(rows, skip_rows)

    def _examples(self, source: SourceSettings, asked: SelfSettings) -> list[str]:
        """Prompts that were kept of the source that this one is to be like."""
        if not asked.like:
            return []
        names = [one.name for one in self._settings.sources]
        found = read_examples(source_directory(self._work, names.index(asked.like)))
        if len(found) < asked.shown:
            raise ConfigError(
                f"source {source.name} is to be like {asked.like}, which has {len(found)} prompts "
                f"of at most {MOST_CHARS:,} characters, and {asked.shown} are to be shown each "
                "time; name another source, or lower `shown`."
            )
        return found


def source_directory(work: Path, number: int) -> Path:
    """Where the kept rows of a source lie until they are blended."""
    return work / f"source-{number:03d}"
